"""A script that closes its own stdout and ends."""

import sys

from small import net, train

train(net(), 30)
print("said")
sys.stdout.close()
sys.stderr.write("and the other\n")
