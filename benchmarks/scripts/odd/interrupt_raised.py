"""KeyboardInterrupt that nobody catches: files are flushed, exit handlers run, then death of the signal."""

import atexit
import sys
import weakref

log = open("log.csv", "w")
log.write("epoch,loss\n1,0.5\n")


class Run:
    def __del__(self, out=sys.stdout, say=print):
        say("run closed", file=out, flush=True)


run, atexit_said = Run(), atexit.register(print, "exit handler")
weakref.finalize(run, print, "finalizer")
raise KeyboardInterrupt
