"""A run that ran out of memory: what held it at that moment, by category and by line of the script.

Read from the exception: its traceback keeps the frames, and so the tensors, alive. What another batch size would have
taken is stated only as far as these figures imply it.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING

from flatout.data.nested import tensors_in
from flatout.levers.subject import Subject
from flatout.machine.process_memory import resident_bytes
from flatout.memory.out_of_memory import is_out_of_memory
from flatout.parameters import parameters_of
from flatout.tracebacks import is_users_file
from flatout.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

MOST_HOLDERS = 8
DEEPEST = 4
WORTH_SAYING = 0.1
"""Share of what is held: less would not have helped."""
_REQUEST = re.compile(r"tried to allocate ([\d.]+ ?(?:[KMGT]i)?B)", re.IGNORECASE)
_PARTS = {"backward": "backward", "step": "optimizer", "__next__": "data"}


@dataclass(frozen=True, kw_only=True)
class HeldBy:
    """Tensors that one variable of the script held, counted at the innermost one; or one kind of autograd node, which
    has no line."""

    line: str
    name: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryDeath:
    """What is known of that moment."""

    message: str
    line: str
    """The line of the script whose allocation failed."""
    part: str
    requested_bytes: int | None
    """Size of the failed allocation; None where the message does not give it."""
    categories: Mapping[str, int]
    """Bytes of tensors alive: weights, gradients, optimizer, graph (kept for the backward pass), other."""
    holders: tuple[HeldBy, ...]
    batch_size: int | None
    advice: tuple[str, ...]

    @property
    def held_bytes(self) -> int:
        return sum(self.categories.values())

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "held_bytes": self.held_bytes}


def inspect_death(error: BaseException | None, subject: Subject) -> MemoryDeath | None:
    """What is known of an out-of-memory error; None for any other."""
    error = _cause(error)
    if error is None:
        return None
    from flatout.memory.graphs import live_tensors

    seen: set[int] = set()
    categories = {
        "weights": _take(_weights(subject), seen),
        "gradients": _take(_gradients(subject), seen),
        "optimizer": _take(_optimizer_state(subject), seen),
    }
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame, line) for frame, line in frames if is_users_file(frame.f_code.co_filename)]
    holders = _holders(own, set(seen))
    by_kind = _graph_by_kind(seen)
    categories["graph"] = sum(by_kind.values())
    holders += [HeldBy(line="", name=f"graph, by {kind}", size_bytes=size) for kind, size in by_kind.items()]
    holders.sort(key=lambda one: -one.size_bytes)
    categories["other"] = _take(live_tensors(), seen)
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    requested = _requested(message)
    # Did Python itself run out of memory, in a process where tensors are the smaller part?
    of_python = isinstance(error, MemoryError) and 2 * sum(categories.values()) < resident_bytes()
    batch_size = next((loader.batch_size for loader in subject.loaders), None)
    return MemoryDeath(
        message=message,
        line=_where(own[-1]) if own else "",
        part=_part(frames),
        requested_bytes=requested,
        categories=categories,
        holders=tuple(holders[:MOST_HOLDERS]),
        batch_size=batch_size,
        advice=tuple(_advice(categories, requested, batch_size, of_python=of_python)),
    )


def _cause(error: BaseException | None) -> BaseException | None:
    """The out-of-memory error itself, where the script raised another one from it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if is_out_of_memory(error):
            return error
        seen.add(id(error))
        error = error.__cause__
    return None


def _advice(
    categories: Mapping[str, int], requested: int | None, batch_size: int | None, *, of_python: bool
) -> Iterator[str]:
    grows, held = categories["graph"], sum(categories.values())
    if of_python:
        yield f"Python objects took the memory, not tensors ({format_bytes(held)}): look at that line first"
        return
    if requested is None:
        yield "a smaller batch, activation checkpointing or bf16 would need less"
    elif requested > held:
        yield (
            f"the requested tensor, {format_bytes(requested)}, is larger than everything that was held "
            f"({format_bytes(held)}): look at that line first"
        )
    elif batch_size is not None and batch_size > 1 and grows:
        most = math.floor(batch_size * grows / (grows + requested))
        yield (
            f"what is saved for the backward pass grows with the batch; it had reached {format_bytes(grows)}, and "
            f"{format_bytes(requested)} more were needed: of the {batch_size} samples of a batch at most {most} fit up "
            "to this line, and the rest of the step needs more"
        )
    state = categories["optimizer"]
    if state > grows and state >= held * WORTH_SAYING:
        yield f"the optimizer's state is {format_bytes(state)}: SGD or Adafactor keep less of it"
    yield "flatout memory, with a smaller batch, shows the peak by line and what each remedy would save"
    yield "in your own loop: flatout.TrainStep splits a batch that does not fit; flatout.fit_to_memory plans for less"


def _take(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of storages not counted yet."""
    from flatout.torch_private.tensors import storage_identity

    total = 0
    for tensor in tensors:
        storage = _storage(tensor)
        if storage is None or (identity := storage_identity(storage)) in seen:
            continue
        seen.add(identity)
        total += storage.nbytes()
    return total


def _storage(tensor: Tensor) -> UntypedStorage | None:
    """Its storage; None where it has none: sparse layouts, fake tensors, weights of lazy layers."""
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):
        return None
    return None if storage.device.type == "meta" else storage


def _weights(subject: Subject) -> Iterator[Tensor]:
    for module in subject.modules:
        yield from (*module.parameters(), *module.buffers())
    for optimizer in subject.optimizers:
        yield from parameters_of(optimizer)


def _gradients(subject: Subject) -> Iterator[Tensor]:
    for weight in _weights(subject):
        if weight.grad is not None:
            yield weight.grad


def _optimizer_state(subject: Subject) -> Iterator[Tensor]:
    for optimizer in subject.optimizers:
        for state in optimizer.state.values():
            yield from (tensor for _, tensor in tensors_in(state))


def _graph_by_kind(seen: set[int]) -> dict[str, int]:
    """Bytes saved for the backward pass, by the kind of node that saves them first."""
    from flatout.memory.graphs import live_tensors, saved_tensors_of

    sizes: dict[str, int] = {}
    for kind, tensor in saved_tensors_of(live_tensors()):
        size = _take([tensor], seen)
        if size:
            sizes[kind] = sizes.get(kind, 0) + size
    return sizes


def _holders(frames: list[tuple[FrameType, int]], seen: set[int]) -> list[HeldBy]:
    """Variables of the script's frames with what they hold, each tensor counted once, innermost frame first."""
    found = []
    for frame, line in reversed(frames):
        for name, value in list(frame.f_locals.items()):
            if name.startswith("__"):
                continue
            size = _take(_tensors_of(value), seen)
            if size:
                found.append(HeldBy(line=_where((frame, line)), name=name, size_bytes=size))
    return sorted(found, key=lambda one: -one.size_bytes)


def _tensors_of(value: object) -> Iterator[Tensor]:
    """Tensors in nested plain containers; the script's own objects are not searched."""
    if isinstance(value, (set, frozenset)):
        value = list(value)
    try:
        for _, tensor in tensors_in(value):
            yield tensor
    except Exception:  # of the script: a mapping whose file is closed, an object without attributes, a list in itself
        return


def _where(place: tuple[FrameType, int]) -> str:
    frame, line = place
    return f"{frame.f_code.co_filename}:{line}"


def _part(frames: list[tuple[FrameType, int]]) -> str:
    """forward, backward, optimizer or data, by torch's functions in the traceback."""
    from torch.optim import Optimizer

    for frame, _ in frames:
        code = frame.f_code
        if code.co_name in _PARTS and "/torch/" in code.co_filename:
            return _PARTS[code.co_name]
        if code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer):
            return "optimizer"  # the script's own class
    return "forward" if any(frame.f_code.co_name == "_call_impl" for frame, _ in frames) else "other"


def _requested(message: str) -> int | None:
    found = _REQUEST.search(message)
    return None if found is None else parse_bytes(found[1])
