"""``datatrove-ckpt ARGUMENTS``, begun as people begin it:

``command.py ORDER ARGUMENTS``, see ``commands.py``.
"""

import json
import os
import resource
import sys

from datatrove_ckpt.__main__ import main

if __name__ == "__main__":
    order = json.loads(sys.argv.pop(1))
    os.environ.update(order["environment"])
    if order["file_size"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_size"], order["file_size"]))
    sys.exit(main())
