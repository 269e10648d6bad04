"""What a script can see of the interpreter that runs it."""

import atexit
import gc
import locale
import logging
import os
import signal
import sys
import threading
import warnings


def show():
    print(gc.get_threshold(), gc.isenabled(), gc.callbacks, gc.get_freeze_count())
    print(warnings.filters)
    print([signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)])
    print([thread.name for thread in threading.enumerate()], sys.getrecursionlimit(), sys.getswitchinterval())
    print(locale.setlocale(locale.LC_ALL), logging.root.handlers, logging.root.level)
    print(sys.excepthook, sys.displayhook, sys.unraisablehook, sys.gettrace(), sys.getprofile())
    print(sorted(name for name in os.environ if name not in ("_", "OLDPWD", "LINES", "COLUMNS")))


print(sys.argv, sys.flags, sys.path[0] == os.path.dirname(os.path.abspath(__file__)), len(sys.path))
print(sorted(vars()), __name__, __file__, __package__, __spec__, __doc__)
print(sys.modules["__main__"].__dict__ is globals(), sys.stdin.fileno(), os.getcwd() == os.path.dirname(__file__))
show()
import torch
from small import net, train

train(net(), 60)
show()
print(torch.get_num_threads(), torch.initial_seed(), torch.is_grad_enabled(), atexit is not None)
