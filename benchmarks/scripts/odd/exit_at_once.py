"""os._exit: no handler runs, nothing is flushed."""

import atexit
import os

from small import net, train

atexit.register(print, "never")
open("lost.txt", "w").write("buffered")
train(net(), 30)
os.write(1, b"going\n")
os._exit(5)
