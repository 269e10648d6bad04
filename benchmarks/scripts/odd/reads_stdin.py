"""A script that reads its standard input."""

import sys

print(repr(sys.stdin.read()), sys.stdin.isatty())
