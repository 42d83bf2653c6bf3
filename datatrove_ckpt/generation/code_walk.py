"""What release 0.2.0 pickled with a step: its executor.pik names this class, which describes the
user's code as version 5 of the identity did.
"""

from collections import namedtuple

Description = namedtuple("Description", "fields notes own counts edges state documented left")
