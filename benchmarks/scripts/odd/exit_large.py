"""sys.exit with more than a byte."""

import sys

sys.exit(-300)
