"""Exit handlers, finalizers, threads and __del__ in Python's own order."""

import atexit
import sys
import threading
import time
import weakref

log = open("log.csv", "w")
log.write("a,b\n")


class Named:
    def __del__(self, out=sys.stdout, say=print):
        say("__del__", file=out, flush=True)


named, other = Named(), Named()
weakref.finalize(other, print, "finalizer")
atexit.register(print, "first in")
atexit.register(print, "last in")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread done"))).start()
