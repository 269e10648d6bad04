"""SIGTERM without a handler: nothing is flushed, as ever."""

import os
import signal

from small import net, train

log = open("log.csv", "w")
log.write("lost")
print("trained", train(net(), 30) < 10, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
