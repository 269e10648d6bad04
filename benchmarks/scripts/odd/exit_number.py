"""sys.exit with a number."""

import sys

sys.exit(3)
