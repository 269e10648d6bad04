"""Which process the memory that is shown is of, where a script starts others to train in."""

from __future__ import annotations

from typing import Any

import pytest

from flatout.script import memory_trial
from flatout.script.entry import Target
from flatout.script.memory_trial import MemoryRequest, watch_memory
from flatout.script.watched_trial import TrialFound


def answer(steps: int, resident_bytes: int) -> dict[str, Any]:
    return {"event": "memory", "ended": False, "steps": steps, "peak_resident_bytes": resident_bytes}


RANKS: Any = tuple(
    {"name": str(rank), "rank": rank, "ranks": 2, "ended": False, "fault": "", "memory": answer(8, 100 + rank)}
    for rank in range(2)
)


@pytest.mark.parametrize(
    ("own", "ranks", "shown", "resident_bytes"),
    [
        (answer(8, 50), (), "", 50),
        (answer(8, 50), RANKS, "", 50),  # it trains beside them
        (answer(0, 50), RANKS, "rank 0", 100),  # it only starts them
        (None, RANKS, "rank 0", 100),
    ],
)
def test_whose_memory_is_shown(
    own: Any, ranks: Any, shown: str, resident_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = TrialFound(answer=own, end=None, ranks=ranks, rank_notes=(), errors="")
    monkeypatch.setattr(memory_trial, "watched_trial", lambda *given, **named: found)
    watched = watch_memory(MemoryRequest(target=Target(path=__file__, module=None, arguments=())))
    assert (watched.shown_rank, watched.memory.peak_resident_bytes) == (shown, resident_bytes)
    assert [one.name for one in watched.ranks] == ["rank 0", "rank 1"][: len(ranks)]
