"""A process that outlives a killed launcher, to end the ranks that it leaves behind.

Run as a file, with the folder that is to be removed as its argument. It reads lines '+PID' (the leader of a process
group) and '-PID' (gone, as the launcher knows). When its input ends, it kills the groups that are left. Only Python's
own modules: it is there before the ranks are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys


def main() -> None:
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)  # it ends when the launcher does
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        with contextlib.suppress(ValueError):
            number = int(line)
            (groups.add if number > 0 else groups.discard)(abs(number))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    if len(sys.argv) > 1:
        shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
