"""sys.exit with words."""

import sys

print("out")
sys.exit("some words")
