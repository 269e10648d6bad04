"""What is found in processes that train together: each leaves its own in a folder, for the parent of the trial.

    answers = RankAnswers(folder, "4242"); answers.begin()      # in a rank: it is there
    answers.give(rank_answer)                                   # and was watched; it trains on until it is ended
    RankWatch(folder).settled()                                 # in the parent: nothing more will come

A rank holds a lock on the file that says that it is there. The kernel releases it when the process dies, however it
dies, and in whichever PID namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from flatout.script.trial.messages import Command, MemoryAnswer, ProfileAnswer
from flatout.whole_files import PRIVATE, written_whole

try:
    import fcntl
except ImportError:  # Windows, where there are no trials
    fcntl = None  # type: ignore[assignment]

SETTINGS, BEGUN, ANSWER = "watched.json", "begun-", "answer-"
LATE_RANK_SECONDS = 5.0
"""After the last process that has begun: ranks that train apart say nothing of how many they are."""
END_SECONDS = 10.0
"""What the script has to end by itself after a rank has died, or all have ended; and what the others have to answer."""
MOST_BYTES, MOST_RANKS = 64 << 20, 1024


class RankSettings(TypedDict):
    """What ranks are to do."""

    command: Command
    target: list[str]
    """The script's command."""


class RankAnswer(TypedDict):
    """Of one rank."""

    name: str
    """Of its files."""
    rank: int | None
    ranks: int | None
    """How many train together; None: it trains alone."""
    ended: bool
    """By itself, before it was watched for as long as was asked."""
    fault: str
    """Why it could not be watched; '' where it could."""
    profile: NotRequired[ProfileAnswer]
    record: NotRequired[dict[str, object]]
    """A ProcessRecord, of the steps that were timed for the profile."""
    memory: NotRequired[MemoryAnswer]


class RankAnswers:
    """Of this process."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._descriptor: int | None = None

    def begin(self) -> None:
        if self._descriptor is not None:
            return
        place = self.folder / f"{BEGUN}{self.name}"
        with contextlib.suppress(OSError):
            self._descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its own: its forks have no part in it

    def give(self, answer: RankAnswer) -> None:
        with written_whole(self.folder / f"{ANSWER}{self.name}.json", mode=PRIVATE, durable=False) as temporary:
            temporary.write_text(json.dumps(answer, allow_nan=False), encoding="utf-8")


class RankWatch:
    """In the parent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun: set[str] = set()
        self._newest = self._over_since = 0.0
        self.dead: tuple[str, ...] = ()
        """Names of ranks that have died without an answer."""

    def settled(self) -> bool:
        """Have all ranks answered, as far as is known how many there are? Or will they never?"""
        now = time.monotonic()
        begun = self._names(BEGUN, "")
        if begun - self._begun:
            self._begun, self._newest = begun, now
        answered = self._names(ANSWER, ".json")
        if begun and begun <= answered:
            answers = self.answers()
            most = max((one["ranks"] or 0 for one in answers), default=0)
            complete = len(begun) >= most > 0 or (not most and now - self._newest >= LATE_RANK_SECONDS)
            return complete and (not all(one["ended"] for one in answers) or self._waited(now))
        self.dead = tuple(sorted(name for name in begun - answered if self._is_dead(name)))
        return bool(self.dead) and self._waited(now)

    def _waited(self, now: float) -> bool:
        """Has the script had the time to end by itself?"""
        self._over_since = self._over_since or now
        return now - self._over_since >= END_SECONDS

    def answers(self) -> list[RankAnswer]:
        """By rank; what cannot be read is left out."""
        found: list[RankAnswer] = []
        for path in sorted(self._folder.glob(f"{ANSWER}*.json"))[:MOST_RANKS]:
            with contextlib.suppress(OSError, ValueError):
                if path.stat().st_size <= MOST_BYTES:
                    found.append(json.loads(path.read_text(encoding="utf-8")))
        return sorted(found, key=lambda one: (one["rank"] is None, one["rank"] or 0, one["name"]))

    def notes(self, done: str) -> tuple[str, ...]:
        """What is missing, and why. done: what is done to a rank: 'profiled'."""
        answers = self.answers()
        notes = [f"{names_text(self.dead)} died before being {done}"] if self.dead else []
        known = max((one["ranks"] or 0 for one in answers), default=0)
        if known > len(answers):
            notes.append(f"{len(answers)} of {known} ranks were {done}")
        return tuple(notes)

    def _names(self, prefix: str, suffix: str) -> set[str]:
        paths = self._folder.glob(f"{prefix}*{suffix}")
        return {path.name.removeprefix(prefix).removesuffix(suffix) for path in paths}

    def _is_dead(self, name: str) -> bool:
        """Is its lock free?"""
        try:
            with open(self._folder / f"{BEGUN}{name}", "r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def write_settings(folder: Path, settings: RankSettings) -> None:
    (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")


def read_settings(folder: Path) -> RankSettings:
    found: RankSettings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    return found


def names_text(names: Sequence[str]) -> str:
    """'process 4242', 'processes 4242, 4243'."""
    return f"process{'es' * (len(names) > 1)} {', '.join(names)}"
