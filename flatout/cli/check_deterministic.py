"""flatout run --check-deterministic: two runs of a script as trials, compared to the bit."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

from flatout.cli.ended_by_signal import signals_as_exits

if TYPE_CHECKING:
    from flatout.script.entry import Target


def check_deterministic(target: Target, *, allow_network: bool) -> int:
    """Exit code 0: bit-identical; 1: not."""
    from flatout.cli.stdin_copy import stdin_copy
    from flatout.report.deterministic_text import determinism_text
    from flatout.script.deterministic_check import check_determinism

    try:
        with signals_as_exits(), stdin_copy() as stdin_file:
            found = check_determinism(target, stdin_file, allow_network=allow_network)
    except KeyboardInterrupt:  # its script runs in trials: the interrupt is not the script's own end
        sys.stderr.write("interrupted\n")
        return 128 + signal.SIGINT
    print(determinism_text(found))
    return 0 if found.equal else 1
