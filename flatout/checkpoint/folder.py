"""A folder of checkpoints: save, find, load the newest that is whole, keep the last and the best.

Each is a folder named after the order of saving and the step, 000012-step-600. The order decides which is the
newest: where a run goes back to step 100 and saves at 110, that is newer than its 600 of before.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from flatout.arguments import as_path, as_whole_number, wrong
from flatout.checkpoint.background import BackgroundWork, HostCopies
from flatout.checkpoint.disk import (
    abandoned_folders,
    check_space,
    existing_in,
    remove_folder,
    sweep,
    whole_folder,
    write_error,
)
from flatout.checkpoint.manifest import SCHEMA, StoredFile, damaged, schema_of
from flatout.checkpoint.parts import PREFIX, Part
from flatout.checkpoint.saved import Checkpoint, Loaded, fill, open_checkpoint, structure_text, write_parts
from flatout.checkpoint.shared_saves import SharedSave
from flatout.checkpoint.structure import Split, split
from flatout.data.nested import leaves_in
from flatout.errors import UsageError
from flatout.machine.ranks import joined_rank

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_HEADER_BYTES, _MARGIN_BYTES = 512, 64 * 1024
"""Room for a tensor's entry in its file's header, and for the manifest and the file system's overhead."""


class Checkpoints:
    """Checkpoints of one run in one folder, which the first save creates.

    `keep_last` and `keep_best` say how many of the newest and of the best by metric stay; an older one is deleted
    only once a newer one is safely on the disk. With `asynchronous`, save copies the tensors to the host and returns;
    one thread writes them, at most one save in flight. Only rank 0 writes, and the others only their parts of tensors
    that are spread over ranks, into the same folder; `rank` defaults to that of torch.distributed.
    Raises UsageError for values out of range and for a `folder` that is a file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        best: Literal["min", "max"] = "min",
        asynchronous: bool = False,
        rank: int | None = None,
    ) -> None:
        self.folder = as_path(folder, "folder")
        _check_settings(self.folder, keep_last, keep_best, best)
        self._keeping = _Keeping(last=keep_last, best=keep_best, lowest_is_best=best == "min")
        self._asynchronous, self._rank = asynchronous, rank
        self._copies, self._part_copies, self._background = HostCopies(), HostCopies(), BackgroundWork()
        self._swept = False
        self._saving = threading.RLock()
        """Held by a thread that calls `save`: another would copy its tensors over those that are being written."""
        self._damaged: set[str] = set()
        """Names of checkpoints that `load` has found to be damaged."""
        # a failure that no call of `wait` raised is at least shown when the interpreter exits
        self._at_exit = weakref.finalize(self, self._background.wait)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Raises UsageError: two would each write the folder, and a save in flight belongs to a thread here."""
        raise UsageError(
            f"the Checkpoints of {self.folder} cannot be copied, or sent to another process",
            limit="one of them writes its folder",
            remedy="pass the folder, and make one of it where it is used: flatout.Checkpoints(folder).load()",
        )

    @property
    def lowest_is_best(self) -> bool:
        """Is the lowest metric the best one, or the highest?"""
        return self._keeping.lowest_is_best

    def save(self, state: Mapping[str, object], *, step: int, metric: float | None = None) -> None:
        """Write the state to the disk, whole or not at all, then delete what is no longer kept.

        Raises UsageError if the state holds what cannot be stored (before anything is written) or the folder cannot
        be written, MachineError if the disk is full or fails; the checkpoints before are untouched. With
        `asynchronous`, first waits for the save before; if that one failed, raises its error and saves nothing. Where
        several ranks write their parts, what goes wrong on one is raised there and on rank 0, and nothing is saved.
        """
        with self._saving:
            self._save(state, step, metric)

    def _save(self, state: Mapping[str, object], step: int, metric: float | None) -> None:
        first = (joined_rank() if self._rank is None else self._rank) == 0
        shared = SharedSave() if _has_parts(state) else None  # before what may fail: ranks count their saves alike
        if not first and shared is None:
            return
        with _told_of_failure(shared):
            self.wait()
            step, metric = _checked_step(step), _checked_metric(metric)
            found = split(state)
            if first:
                write = self._whole(found, shared, step, metric)
            else:
                assert shared is not None
                fill_in = functools.partial(write_parts, rank=shared.rank, parts=self._taken_parts(found.parts))
                write = functools.partial(shared.write, fill_in, step)
        if self._asynchronous:
            self._background.start(write)
        else:
            write()

    def check_writable(self) -> None:
        """Raise UsageError if nothing can be saved here: better before a training than at its first save."""
        existing = existing_in(self.folder.absolute())
        if existing is not None and not os.access(existing, os.W_OK | os.X_OK):
            raise UsageError(
                f"checkpoints cannot be written to {self.folder}: {existing} may not be written",
                remedy="name a folder that you may write",
            )

    def _whole(self, found: Split, shared: SharedSave | None, step: int, metric: float | None) -> Callable[[], None]:
        """Checks, copies what has to be copied, and returns the work that is left."""
        structure = structure_text(found.structure)
        need_bytes = _need_bytes(structure, [*found.tensors.values(), *(one.local for one in found.parts.values())])
        if not self._swept:
            sweep(self.folder)
            self._swept = True
        check_space(self.folder, need_bytes, _called(step))
        parts = None
        if shared is not None:
            parts = functools.partial(_all_parts, shared, self._taken_parts(found.parts), step)
        tensors = self._copies.take(found.tensors) if self._asynchronous else found.tensors
        content = functools.partial(fill, structure=structure, tensors=tensors, step=step, metric=metric, parts=parts)
        # without self: a save in flight does not keep alive a Checkpoints that nothing else holds
        keeping = replace(self._keeping, damaged=frozenset(self._damaged))
        write = functools.partial(_write, self.folder, step, content, need_bytes, keeping)

        def told() -> None:
            with _told_of_failure(shared):
                write()

        return told

    def _taken_parts(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """The parts, copied where they are written later."""
        if not self._asynchronous:
            return dict(parts)
        copies = self._part_copies.take({(PREFIX, name): part.local for name, part in parts.items()})
        return {name: replace(part, local=copies[PREFIX, name]) for name, part in parts.items()}

    def latest(self) -> Checkpoint | None:
        """The newest whose manifest and sizes are right (checksums are verified by its load); None without one."""
        self._background.join()
        return next((one for entry in reversed(_entries(self.folder)) if (one := _opened(entry))), None)

    def best(self) -> Checkpoint | None:
        """The one with the best metric, the newest of equals; None if none was saved with a metric (NaN is none)."""
        self._background.join()
        ranked = _ranked(_entries(self.folder), self._keeping.lowest_is_best)
        return ranked[0][1] if ranked else None

    def at(self, step: int) -> Checkpoint:
        """The newest of this step. Raises UsageError naming the steps that are there."""
        self._background.join()
        entries = _entries(self.folder)
        for entry in reversed(entries):
            if entry.step == step and (found := _opened(entry)):
                return found
        there = ", ".join(str(entry.step) for entry in entries if _opened(entry)) or "none"
        raise UsageError(f"no checkpoint of step {step} in {self.folder}", limit=f"the steps there are: {there}")

    def load(self) -> Loaded | None:
        """The newest that is whole, every byte verified; None if nothing was ever saved.

        What is skipped is listed in its `notes` and warned of. Raises UsageError if there are checkpoints and none is
        whole, or if the newest is of a newer Flatout: starting over would throw away what is there.
        """
        self._background.join()
        notes = [f"{one.name} is an interrupted save" for one in abandoned_folders(self.folder)]
        entries = _entries(self.folder)
        loaded = None
        for entry in reversed(entries):
            try:
                checkpoint = _open(entry)
                loaded = Loaded(checkpoint=checkpoint, state=checkpoint.load(), notes=tuple(notes))
                break
            except UsageError as error:
                if _is_newer(entry):
                    raise
                if not _is_unreadable(error):
                    self._damaged.add(entry.folder.name)
                notes.append(f"{entry.folder.name} was skipped: {error.what}")
        if loaded is None and entries:
            remedy = "restore one from a backup, or name another folder to start over"
            raise UsageError(f"no checkpoint in {self.folder} is whole: {'; '.join(notes)}", remedy=remedy)
        for note in notes:
            outcome = "nothing was saved before" if loaded is None else f"step {loaded.step} is loaded"
            warnings.warn(f"{note}; {outcome}", stacklevel=2)
        return loaded

    def wait(self) -> None:
        """Until nothing is in flight. Raises the error of the save in the background."""
        self._background.wait()

    def close(self) -> None:
        """Wait, and give the memory of the copies back. Raises as `wait`."""
        try:
            self.wait()
        finally:
            self._copies.release()
            self._part_copies.release()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class _Keeping:
    last: int
    best: int
    lowest_is_best: bool
    damaged: frozenset[str] = frozenset()
    """Names of checkpoints that count among neither, though their sizes are right."""


@dataclass(frozen=True, kw_only=True)
class _Entry:
    sequence: int
    step: int
    folder: Path


def _entries(folder: Path) -> list[_Entry]:
    """What has a checkpoint's name, oldest first."""
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        what = f"{folder} cannot be read: {error.strerror}"
        raise UsageError(what, remedy="name a folder that you may read") from error
    named = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name))]
    entries = [_Entry(sequence=int(match[1]), step=int(match[2]), folder=path) for match, path in named]
    return sorted(entries, key=lambda entry: (entry.sequence, entry.step))


def _open(entry: _Entry) -> Checkpoint:
    checkpoint = open_checkpoint(entry.folder)
    if checkpoint.step != entry.step:
        raise damaged(entry.folder, f"it holds step {checkpoint.step}")
    return checkpoint


def _opened(entry: _Entry) -> Checkpoint | None:
    """None if it is damaged. Raises UsageError if it is of a newer Flatout."""
    try:
        return _open(entry)
    except UsageError:
        if _is_newer(entry):
            raise
        return None


def _is_unreadable(error: UsageError) -> bool:
    """Is it of a file system that fails or refuses, perhaps only now, and not of damage?"""
    return isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)


def _may_be_deleted(entry: _Entry) -> bool:
    """Not what a newer Flatout wrote, nor what cannot be read now and may be whole."""
    try:
        _open(entry)
    except UsageError as error:
        return not _is_unreadable(error) and not _is_newer(entry)
    return True


def _is_newer(entry: _Entry) -> bool:
    return (schema_of(entry.folder) or 0) > SCHEMA


def _ranked(entries: list[_Entry], lowest: bool) -> list[tuple[_Entry, Checkpoint]]:
    """Those with a metric, the best first; of equals the newest."""
    found = [(entry, one) for entry in reversed(entries) if not _is_newer(entry) and (one := _opened(entry))]
    rated = [pair for pair in found if pair[1].metric is not None and not math.isnan(pair[1].metric)]
    return sorted(rated, key=lambda pair: (pair[1].metric or 0.0) * (1 if lowest else -1))


def _write(folder: Path, step: int, fill_in: Callable[[Path], None], need_bytes: int, keeping: _Keeping) -> None:
    try:
        sequence = max((one.sequence for one in _entries(folder)), default=0) + 1
        with whole_folder(folder, f"{sequence:06d}-step-{step}") as place:
            fill_in(place)
    except OSError as error:
        raise write_error(error, folder, need_bytes, _called(step)) from error
    _prune(folder, keeping)


def _prune(folder: Path, keeping: _Keeping) -> None:
    """Called when the newest has just been written and flushed, so that one whole checkpoint always stays."""
    entries = [entry for entry in _entries(folder) if _may_be_deleted(entry)]
    whole = [entry for entry in entries if entry.folder.name not in keeping.damaged and _opened(entry)]
    kept = {entry.folder for entry in whole[-keeping.last :]}
    kept |= {entry.folder for entry, _ in _ranked(whole, keeping.lowest_is_best)[: keeping.best]}
    for entry in entries[:-1]:
        if entry.folder not in kept:
            try:
                remove_folder(entry.folder)
            except OSError as error:
                warnings.warn(f"{entry.folder} cannot be deleted: {error.strerror}", stacklevel=4)


def _called(step: int) -> str:
    return f"the checkpoint of step {step}"


def _all_parts(shared: SharedSave, parts: Mapping[str, Part], step: int, folder: Path) -> dict[str, StoredFile]:
    """Rank 0's parts, written, and the other ranks'."""
    shared.begin(folder, step)
    name, own = write_parts(folder, shared.rank, parts)
    return {name: own, **shared.collected(folder)}


@contextlib.contextmanager
def _told_of_failure(shared: SharedSave | None) -> Iterator[None]:
    """The other ranks, which may wait for a folder, or for this rank's part."""
    try:
        yield
    except BaseException as error:
        if shared is not None:
            shared.cancel(error)
        raise


def _has_parts(state: object) -> bool:
    with contextlib.suppress(RecursionError):  # of a value that holds itself, which `split` refuses
        return next(leaves_in(state, "state", lambda one: isinstance(one, Part)), None) is not None
    return False


def _need_bytes(structure: bytes, tensors: Sequence[torch.Tensor]) -> int:
    content = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return content + len(structure) + _HEADER_BYTES * len(tensors) + _MARGIN_BYTES


def _checked_step(step: int) -> int:
    whole = operator.index(step) if hasattr(step, "__index__") and not isinstance(step, bool) else -1
    if whole < 0:
        raise UsageError(f"step is {step!r}", limit="it must be a whole number from 0", remedy="pass step=0, 1, 2, ...")
    return whole


def _checked_metric(metric: float | None) -> float | None:
    try:
        return None if metric is None else float(metric)
    except (TypeError, ValueError, RuntimeError) as error:
        raise wrong("metric", metric, "it is a number", "pass metric=figures['loss']") from error


def _check_settings(folder: Path, keep_last: int, keep_best: int, best: str) -> None:
    as_whole_number(keep_last, "keep_last", remedy="pass keep_last=1")
    as_whole_number(keep_best, "keep_best", least=0, remedy="pass keep_best=0")
    if best not in ("min", "max"):
        raise UsageError(f"best is {best!r}", limit="it must be 'min' or 'max'")
    existing = existing_in(folder)
    if existing is not None and not existing.is_dir():
        raise UsageError(f"{existing} is a file", limit="checkpoints need a folder", remedy="name another place")
