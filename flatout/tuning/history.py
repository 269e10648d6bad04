"""Measurements of earlier tunes on this machine, kept in one small file to improve the predictions of later ones.

Each trial of a single lever records the predicted and the measured speedup, with a digest of what trained: nothing of
the user's code, data or paths. A later tune with the same versions uses it:

    the same choice, the same training     the measurement replaces the prediction
    the same choice, other trainings       the prediction is shifted by its error there, shrunk towards none

A tune that competed with other processes for the cores leaves nothing. The history decides what is tried first. What is
skipped because it cannot pay off is decided by the lever's own prediction.

    history = load_history(machine)
    TrainingSearch(trials, machine, levers, limits, progress, history).run()
    history.save()
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from flatout import __version__, environment
from flatout.decoding import decode
from flatout.errors import MachineError
from flatout.file_locks import lock_now
from flatout.levers.lever import Saving, times_as_fast
from flatout.levers.observed import Observed
from flatout.machine.description import Machine
from flatout.search.trial import Trial
from flatout.statistics import median
from flatout.units import counted
from flatout.whole_files import PRIVATE, written_whole

SCHEMA = 1
"""Of the file; one with a higher number was written by a newer Flatout and is left alone."""
MOST_TRIALS = 500
"""Beyond this, the oldest are dropped."""
REPEAT_ERROR = 0.15
"""Logarithm: the interval of one tune, widened by this much, contained 95 % of the ratios that other tunes of the same
script measured (450 pairs of trials in benchmarks/results/scripts_tune_*.json and search_predictions_*.json)."""
SHRINKAGE = 2.0
"""A shift is the sum of the errors on n other trainings over n plus this. `python -m benchmarks.search.predictions`
predicts each script by the trials of the others: of 0 to 16 this left the smallest mean square error."""
LARGEST_ERROR = math.log(2.0)
"""Logarithm: an error beyond this on another training says nothing about this one (a lever that was measured at x60
beside processes that spun on every core), and counts as this much."""
LOCK_SECONDS = 1.0
"""A tune that ends holds the lock for milliseconds."""
FORGET = "flatout check --forget-tunes"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Identifies what trained, so that two tunes can be matched."""

    digest: str
    device: str
    """'cpu' or 'cuda'."""

    @classmethod
    def of(cls, kind: str, loop: str | None, first: Observed, device: str) -> Training:
        """`first`: observed before anything was kept; `device`: where it trains now."""
        flops = None if first.flops_per_step is None else f"{first.flops_per_step:.1e}"
        sizes = [one.batch_size for one in first.loaders]
        parts = (kind, loop, sizes, flops, first.threads, device := device.partition(":")[0])
        return cls(digest=hashlib.sha256(repr(parts).encode()).hexdigest()[:16], device=device)


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """One trial of one lever in an earlier tune. Ratios are speedups."""

    machine: str
    """Its fingerprint."""
    versions: str
    training: str
    device: str
    choice: str
    """The lever with its value, as in a report."""
    predicted: float
    """By the lever alone, without history."""
    measured: float
    low: float | None
    """Of the interval; None: too few pairs for one."""
    high: float | None
    at: str
    """ISO 8601, UTC."""

    def __post_init__(self) -> None:
        ratios = (self.predicted, self.measured, self.low or self.measured, self.high or self.measured)
        if not all(0 < ratio < math.inf for ratio in ratios):
            raise ValueError("not a trial")
        datetime.fromisoformat(self.at)

    @property
    def error(self) -> float:
        """Logarithm of the measured over the predicted ratio."""
        return math.log(self.measured / self.predicted)


class _UnknownField(ValueError):
    """In the file."""


class History:
    """The trials of earlier tunes, and those of this one, which do not affect its own predictions."""

    def __init__(self, machine: Machine | None = None, path: Path | None = None) -> None:
        """path: None: empty, and nothing is saved."""
        self.warning = ""
        """Why it was not read or not saved, in one line."""
        self._path, self._new = path, list[Earlier]()
        self._fingerprint = machine.fingerprint if machine else ""
        self._versions = f"torch {machine.versions.torch}, flatout {__version__}" if machine else ""
        found = self._read() if path is not None else []
        mine = (self._fingerprint, self._versions)
        self._known = [one for one in found if (one.machine, one.versions) == mine]

    def corrected(self, own: Saving, choice: str, training: Training) -> Saving:
        """A lever's own prediction, corrected by earlier tunes."""
        return corrected(own, choice, training, self._known)

    def note(self, trial: Trial, training: Training) -> None:
        """Record a trial of one lever; a failed comparison is not recorded."""
        found, predicted = trial.comparison, trial.predicted
        if self._path is None or found is None or predicted is None or trial.outcome == "failed":
            return
        expected = predicted.expected if predicted.own_expected is None else predicted.own_expected
        known = found.has_interval and found.low > 0
        with contextlib.suppress(ValueError):  # a meaningless ratio: the clock stood still
            self._new.append(
                Earlier(
                    machine=self._fingerprint,
                    versions=self._versions,
                    training=training.digest,
                    device=training.device,
                    choice=trial.label,
                    predicted=times_as_fast(expected),
                    measured=found.ratio,
                    low=found.low if known else None,
                    high=found.high if known else None,
                    at=datetime.now(UTC).isoformat(timespec="seconds"),
                )
            )

    def discard(self) -> None:
        """Drop the trials of this tune: they were measured beside busy processes."""
        self._new = []

    def save(self) -> None:
        """Add the trials of this tune to the file, atomically. Never fails: `warning` says why nothing was saved."""
        new, self._new = self._new, []
        if self._path is None or not new:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self._path.parent):
                trials = [*self._read(), *new][-MOST_TRIALS:]  # read again: another tune may have ended since
                if self._path is not None:
                    with written_whole(self._path, mode=PRIVATE) as temporary:
                        document = {"schema": SCHEMA, "trials": [asdict(trial) for trial in trials]}
                        temporary.write_text(json.dumps(document, indent=0), encoding="utf-8")
        except OSError as error:
            self._warn(f"cannot be kept in {self._path}: {error.strerror}")

    def _read(self) -> list[Earlier]:
        """The trials in the file. A corrupt file is overwritten; one of a newer version is left alone."""
        assert self._path is not None
        try:
            return _trials(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except OSError as error:
            self._warn(f"cannot be read from {self._path}: {error.strerror}")
        except MachineError as newer:
            self._warn(f"is not used: {self._path} {newer}")
            self._path = None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f" ({error})" if isinstance(error, _UnknownField) else ""
            self._warn(f"is not used: {self._path} is corrupt{why} and will be overwritten")
        return []

    def _warn(self, why: str) -> None:
        self.warning = self.warning or f"what earlier tunes measured {why}"


def load_history(machine: Machine) -> History:
    """History of the tunes on this machine with these versions; empty where the user disabled it."""
    return History(machine, _file()) if environment.keeps_history() else History()


def forget_tunes() -> Path | None:
    """Delete the history; returns the deleted file, None where there was none. Raises MachineError."""
    path = _file()
    try:
        with _locked(path.parent):
            path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise MachineError(f"cannot delete {path}: {error.strerror}", remedy="delete it yourself") from error
    return path


def corrected(own: Saving, choice: str, training: Training, known: Sequence[Earlier]) -> Saving:
    """own: the lever's own prediction. See the top of this file."""
    same = [one for one in known if (one.choice, one.device) == (choice, training.device)]
    here = [one for one in same if one.training == training.digest]
    return _as_measured(own, here) if here else _shifted(own, same)


def _as_measured(own: Saving, here: Sequence[Earlier]) -> Saving:
    """The median, with an interval that contains all of theirs; where one has none, or one that says nothing more than
    the lever's own, that as well."""
    least, _, most = own.ratios
    intervals = [
        (min(one.measured, least), max(one.measured, most))
        if one.low is None or one.high is None or (one.low < least and one.high > most)
        else (one.low, one.high)
        for one in here
    ]
    low = min(low for low, _ in intervals) / math.exp(REPEAT_ERROR)
    high = max(high for _, high in intervals) * math.exp(REPEAT_ERROR)
    ratio, last = median([one.measured for one in here]), max(one.at for one in here)[:10]
    said = f"measured x{ratio:.2f} here on {last}"
    if len(here) > 1:
        said = f"measured x{ratio:.2f} here, the median of {len(here)}, last on {last}"
    return _from_ratios(own, (low, ratio, high), said)


def _shifted(own: Saving, others: Sequence[Earlier]) -> Saving:
    """The same interval, shifted."""
    errors: dict[str, list[float]] = {}
    for one in others:
        errors.setdefault(one.training, []).append(one.error)
    means = (sum(some) / len(some) for some in errors.values())
    bounded = sum(max(-LARGEST_ERROR, min(LARGEST_ERROR, mean)) for mean in means)
    factor = math.exp(bounded / (len(errors) + SHRINKAGE))
    if f"{factor:.2f}" == "1.00":
        return own
    least, expected, most = (factor * ratio for ratio in own.ratios)
    said = f"shifted x{factor:.2f} by {counted(len(errors), 'other training')}"
    return _from_ratios(own, (least, expected, most), said)


def _from_ratios(own: Saving, ratios: tuple[float, float, float], said: str) -> Saving:
    least, expected, most = (1 - 1 / ratio for ratio in ratios)
    return replace(own, least=least, expected=expected, most=most, own_expected=own.expected, earlier=said)


# the file


def _file() -> Path:
    return environment.cache_dir() / "tunes.json"


def _trials(text: str) -> list[Earlier]:
    """Raises MachineError for a file of a newer Flatout, other errors for an invalid file."""
    document = json.loads(text)
    if document["schema"] > SCHEMA:
        newer = f"was written by a newer Flatout (schema {document['schema']}; this one reads {SCHEMA})"
        raise MachineError(newer, remedy=f"upgrade Flatout, or delete it: {FORGET}")
    for trial in document["trials"]:
        for name in trial:
            if name not in Earlier.__dataclass_fields__:
                raise _UnknownField(f"unknown field {name!r}")
    return [decode(Earlier, trial) for trial in document["trials"]]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Serializes tunes that end at the same time. Where locking is unavailable, or the lock is stuck, it goes on
    without: the file stays valid, but the trials of one tune may be lost."""
    descriptor = os.open(folder, os.O_RDONLY)
    until = time.monotonic() + LOCK_SECONDS
    try:
        while time.monotonic() < until:
            try:
                if lock_now(descriptor):
                    break
            except OSError:
                break
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
