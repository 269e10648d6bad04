"""`python -m flatout.serve FOLDER DESCRIPTOR SECONDS`: the process of a run's page; see `page_server`.

It announces itself in one line of JSON on the descriptor: {"url": ...} or {"error": ...}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from flatout.errors import FlatoutError, describe_error


def main() -> int:
    """Serve until the run has ended, and so many seconds longer."""
    folder, descriptor, linger_seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    try:
        if hasattr(os, "nice"):
            os.nice(5)  # training comes first
        from flatout.serve.page_server import RunPages, make_server, serve_until_the_end

        pages = RunPages(folder)
        server = make_server(pages)
    except (OSError, FlatoutError) as error:
        _say(descriptor, {"error": describe_error(error)})
        return 1
    _say(descriptor, {"url": pages.url(server.server_port)})
    serve_until_the_end(server, pages, linger_seconds=linger_seconds)
    return 0


def _say(descriptor: int, line: dict[str, str]) -> None:
    os.write(descriptor, (json.dumps(line) + "\n").encode())
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
