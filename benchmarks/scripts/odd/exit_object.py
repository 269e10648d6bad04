"""sys.exit with an object."""

import sys

sys.exit({"reason": (1, 2)})
