"""The names of ``datatrove_ckpt`` under the import path of datatrove's ``run_inference``. Each is
imported at its first use.
"""

from datatrove_ckpt import __dir__ as __dir__
from datatrove_ckpt import __getattr__ as __getattr__
