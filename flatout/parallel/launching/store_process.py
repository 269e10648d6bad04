"""A process that holds the store where ranks meet (torch's TCPStore), on a socket that is already bound.

Run as a file with the socket's descriptor, and 'now' or 'later': once a rank connects, which that of a job of one may
never do. Left to itself, a TCPStore listens on every network of the machine; this one listens on the address that the
launcher has chosen. It is a process of its own because it needs torch, which the launcher does not load. It ends when
its input does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the launcher does
    threading.Thread(target=_end_with_input, daemon=True).start()
    descriptor = int(sys.argv[1])
    if sys.argv[2] == "later":
        select.select([descriptor], [], [])
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs do not re-export it

    listener = socket.socket(fileno=descriptor)
    host, port = listener.getsockname()[:2]
    store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    while True:
        signal.pause()
        assert store is not None


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
