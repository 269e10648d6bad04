"""The state of a run at chosen steps, written by one process and compared with another's.

Training is chaotic: after a few hundred steps a single rounding error shows in the third digit, and smaller effects
cannot be seen. So runs are not only compared from their start. At each *check step* the plain run writes its state
(parameters, buffers, optimizer state), the gradients that its optimizers got, and the parameters after the step.
Another run stops at the same steps, measures how far it has drifted from that state since the last check, loads the
state, and makes the step from there:

    drift      parameters and buffers against the plain run's, on arrival at the check step
    gradients  of the same step from the same state: the effect of a lever on forward and backward
    updates    of the parameters, from the plain run's own gradients: the effect of a lever on the optimizer

That is why the gradients are replaced: 16-bit products change gradients by a per cent, which would hide a lost weight
decay, a skipped parameter or a lost momentum. Without an optimizer a step begins when its backward pass has ended, so
the gradients of its update belong to the state.

For models beyond `LARGEST_STATE_BYTES` the state is too large to be loaded; a sample of each tensor is compared
instead, and the optimizer gets the run's own gradients. Its updates are then compared only where a gradient is clear
of its noise: Adam makes a whole step of noise alone (of the gradients of biases of keys in attention, say, which are
zero but for rounding).
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from flatout.data.nested import tensors_in
from flatout.generators import generator_states
from flatout.levers.low_bit import is_in_codes, write_codes
from flatout.levers.subject import Subject
from flatout.parameters import all_parameters, own_part, parameters_of, state_of

if TYPE_CHECKING:
    from torch import Tensor

TensorRow = tuple[str, float, float, float]
"""(name, error, how far the plain run moved it, one rounding error), or of a gradient (name, error, size, product)."""
Early = Mapping[int, "Tensor"]
"""Gradients that a backward pass has already applied, by the identity of their parameters."""
NO_EARLY: Early = MappingProxyType({})

LARGEST_STATE_BYTES, LARGEST_REFERENCE_BYTES = 1 << 30, 4 << 30
"""At one check step, and over all of them. Few check steps are far apart, and where training amplifies noise, it tells
nothing after a hundred steps."""
SHARE_OF_DISK = 0.25
"""Of what is free: the most that all check steps may take."""
SAMPLED_ELEMENTS = 1 << 14
"""Per tensor of a model whose state is too large."""
CUDA_SEED_BYTES = 8
"""A CUDA generator's state is its seed, followed by the count of numbers drawn."""
CLEAR_OF_NOISE = 10.0
"""Times the noise of a tensor's gradient: an element as large as that has a direction."""
EARLY_CHECKS = 3
"""The first check steps, at the second, fourth... step of a run. There a state that the script carries from step to
step and that is no weight, such as the hidden state of a recurrent network, is still the plain run's."""
MOST_CALLS = 8
"""Optimizer steps per training step whose gradients are kept (the critic of a GAN makes several)."""


def named_weights(subject: Subject) -> dict[str, Tensor]:
    """The parameters of all models and optimizers, each once, by a name that the user knows; of those that are spread
    over ranks this rank's part."""
    found: dict[int, tuple[str, Tensor]] = {}
    several = len(subject.modules) > 1
    for number, module in enumerate(subject.modules):
        prefix = f"{type(module).__name__}#{number}." if several else ""
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), (prefix + name, parameter))
    for number, optimizer in enumerate(subject.optimizers):
        for index, moved in enumerate(parameters_of(optimizer)):
            found.setdefault(id(moved), (f"optimizer {number}, parameter {index}", moved))
    return {name: own_part(parameter.detach()) for name, parameter in found.values()}


def named_buffers(subject: Subject) -> dict[str, Tensor]:
    """The floating-point buffers of all models, such as running statistics; a sparse one is a constant."""
    import torch

    return {
        f"{type(module).__name__}#{number}.{name}": own_part(buffer)
        for number, module in enumerate(subject.modules)
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and buffer.layout == torch.strided
    }


def optimizer_state(subject: Subject) -> dict[str, Tensor]:
    """Every tensor in the state of an optimizer, those in lists too, as LBFGS keeps them."""
    from torch import Tensor

    found: dict[str, Tensor] = {}
    for number, optimizer in enumerate(subject.optimizers):
        states = {f"{index}.": state_of(optimizer, one) for index, one in enumerate(parameters_of(optimizer))}
        # An optimizer of a script's own may keep something of all parameters together, under a name.
        states[""] = {str(key): value for key, value in optimizer.state.items() if isinstance(key, str)}
        for place, state in states.items():
            for key, value in sorted(state.items(), key=lambda item: str(item[0])):
                for name, one in tensors_in(value, f"{number}.{place}{key}"):
                    if isinstance(one, Tensor):
                        found[name] = own_part(one)
    return found


def generator_digest() -> str:
    """Equal where all global random generators are in the same state. A GPU's counts only once a number was drawn: a
    script that a lever moves to the GPU has it, and the plain one has not."""
    states = generator_states()
    states["cuda"] = [state for state in states.get("cuda", ()) if bool(state[CUDA_SEED_BYTES:].any())]
    digest = hashlib.sha256()
    for part in _flat(states):
        digest.update(part)
    return digest.hexdigest()


def check_bytes(subject: Subject) -> int:
    """What is written at one check step, the whole state."""
    copies = 3 if subject.optimizers else 4
    tensors = [*named_weights(subject).values()] * copies + [
        *named_buffers(subject).values(),
        *optimizer_state(subject).values(),
    ]
    return sum(t.numel() * t.element_size() for t in tensors)


def held_by(subject: Subject) -> list[Tensor]:
    """The parameters whose gradients an update by the script itself is about to use."""
    return [] if subject.optimizers else _trained(subject)


class _Entry(TypedDict):
    """The plain run at one check step, as stored in its file."""

    step: int
    whole: bool
    """False: samples of each tensor."""
    generators: str
    before: dict[str, Tensor]
    held: list[Tensor | None]
    """Without an optimizer: the gradients that the parameters have."""
    buffers: dict[str, Tensor]
    optimizers: dict[str, Tensor]
    losses: list[float]
    gradients: list[list[Tensor | None]]
    """Per optimizer step, those of its parameters."""
    closure: bool
    """Were the gradients computed inside the optimizer step? Then they are those after it."""
    after: dict[str, Tensor]


class _Clear(NamedTuple):
    """Which of a gradient's sampled elements are clear of its noise."""

    drawn_by: int
    """The number with which they were drawn."""
    elements: Tensor


class CheckFound(TypedDict):
    """One check step of a run against the plain one; see `flatout.tuning.numerics.Check`."""

    step: int
    same_generators: bool
    unlike: str
    replaced: bool
    drift: list[TensorRow]
    gradients: list[TensorRow]
    updates: list[TensorRow]


class ReferenceWriter:
    """Writes the plain run's state at its check steps. Called by a NumericsRecorder."""

    def __init__(self, folder: Path, subject: Subject, checks: tuple[int, ...]) -> None:
        self._folder, self._subject = folder, subject
        size = max(1, check_bytes(subject))
        total = min(LARGEST_REFERENCE_BYTES, int(SHARE_OF_DISK * shutil.disk_usage(folder).free))
        most = min(len(checks), total // size) if size <= LARGEST_STATE_BYTES else 0
        self.checks = thinned(checks, most) if most else checks[:1]
        """The steps at which a reference is written: fewer than requested where the state is large."""
        self._whole = most > 0
        self._entry: _Entry | None = None
        self._calls: list[list[Tensor | None]] = []
        self._closure = False

    def before_step(self, step: int) -> None:
        if step not in self.checks:
            return
        weights = named_weights(self._subject)
        self._entry = {
            "step": step,
            "whole": self._whole,
            "generators": generator_digest(),
            "before": _kept(weights, self._whole),
            "held": [_gradient(p, True, i) for i, p in enumerate(held_by(self._subject))] if self._whole else [],
            "buffers": _kept(named_buffers(self._subject), self._whole),
            "optimizers": _kept(optimizer_state(self._subject), self._whole) if self._whole else {},
            "losses": [],
            "gradients": [],
            "closure": False,
            "after": {},
        }
        self._calls, self._closure = [], False

    def backward(self, inside_optimizer: bool) -> None:
        self._closure |= inside_optimizer

    def optimizer(self, parameters: list[Tensor], early: Early) -> None:
        """Before a step of the optimizer with these parameters. early: gradients that it has already applied."""
        if self._entry is not None and len(self._calls) < MOST_CALLS:
            self._calls.append([_gradient(p, self._whole, i, early) for i, p in enumerate(parameters)])

    def after_step(self, losses: list[float]) -> None:
        if self._entry is None:
            return
        weights = named_weights(self._subject)
        if self._closure or not self._calls:  # gradients are computed inside the step, or there is no optimizer
            self._calls = [[_gradient(p, self._whole, i) for i, p in enumerate(_trained(self._subject))]]
            self._closure = True
        self._entry["losses"], self._entry["gradients"], self._entry["closure"] = losses, self._calls, self._closure
        self._entry["after"] = _kept(weights, self._whole)
        from torch.serialization import save

        save(self._entry, self._folder / f"{self._entry['step']}.pt")
        self._entry = None


class ReferenceReader:
    """Compares a run with what a ReferenceWriter wrote, and continues it from there."""

    def __init__(self, folder: Path, subject: Subject, *, own_gradients: bool) -> None:
        self._folder, self._subject, self._own_gradients = folder, subject, own_gradients
        self.whole = True
        """False: the state is too large; samples are compared, and this run continues from its own state."""
        self.checks = tuple(sorted(int(path.stem) for path in folder.glob("*.pt")))
        self.found: list[CheckFound] = []
        """One entry per check step: errors and sizes, tensor by tensor."""
        self._entry: _Entry | None = None
        self._last_after: dict[str, Tensor] = {}
        self._call = 0
        self._clear: dict[str, _Clear] = {}

    def before_step(self, step: int) -> None:
        if step not in self.checks:
            return
        from torch.serialization import load

        entry: _Entry = load(self._folder / f"{step}.pt", weights_only=True, mmap=True, map_location="cpu")
        self._entry = entry
        self.whole = entry["whole"]
        weights, buffers = named_weights(self._subject), named_buffers(self._subject)
        found: CheckFound = {
            "step": step,
            "same_generators": entry["generators"] == generator_digest(),
            "unlike": _unlike(entry["before"], weights, entry["whole"]),
            "replaced": False,
            "drift": [],
            "gradients": [],
            "updates": [],
        }
        self.found.append(found)
        self._call, self._clear = 0, {}
        if found["unlike"]:
            self._entry = None
            return
        found["drift"] = [
            *_differences(entry["before"], weights, self._last_after, entry["whole"]),
            *_differences(entry["buffers"], buffers, {}, entry["whole"]),
        ]
        if entry["whole"]:
            self._put(entry, weights, buffers)
            self._put_gradients(entry["held"])

    def _put_gradients(self, theirs: list[Tensor | None]) -> None:
        parameters = held_by(self._subject)
        if len(theirs) == len(parameters) and any(gradient is not None for gradient in theirs):
            for parameter, gradient in zip(parameters, theirs, strict=True):
                _replace(parameter, gradient)
            self.found[-1]["replaced"] = not self._own_gradients

    def _put(self, entry: _Entry, weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        import torch

        state = optimizer_state(self._subject)
        same_layout = {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in entry["optimizers"].items()}
        with torch.no_grad():
            for mine, theirs in ((weights, entry["before"]), (buffers, entry["buffers"])):
                for name, tensor in mine.items():
                    tensor.copy_(theirs[name])
            if same_layout:
                for name, tensor in state.items():
                    if is_in_codes(tensor):
                        write_codes(entry["optimizers"][name], tensor)
                    else:
                        tensor.copy_(entry["optimizers"][name])

    def update(self, parameters: list[Tensor], parameter: Tensor, ahead: int) -> None:
        """Before one of these parameters is updated in a backward pass: replace its gradient by the plain run's.

        ahead: how many optimizer steps come before that of its optimizer.
        """
        if (theirs := self._to_replace(parameters, self._call + ahead)) is not None:
            _replace(parameter, theirs[next(i for i, one in enumerate(parameters) if one is parameter)])

    def optimizer(self, parameters: list[Tensor], early: Early) -> None:
        entry = self._entry
        if entry is None or entry["closure"] or self._call >= len(entry["gradients"]):
            return
        theirs = entry["gradients"][self._call]
        self._compare_gradients(parameters, theirs, entry["whole"], early)
        if self._to_replace(parameters, self._call) is not None:
            for parameter, gradient in zip(parameters, theirs, strict=True):
                _replace(parameter, gradient)
            self.found[-1]["replaced"] = True
        self._call += 1

    def _to_replace(self, parameters: list[Tensor], call: int) -> list[Tensor | None] | None:
        """The plain run's gradients of that optimizer step, where they replace this run's."""
        entry = self._entry
        if entry is None or entry["closure"] or call >= len(entry["gradients"]):
            return None
        theirs = entry["gradients"][call]
        return None if not entry["whole"] or self._own_gradients or len(theirs) != len(parameters) else theirs

    def after_step(self, losses: list[float]) -> None:
        entry = self._entry
        if entry is None:
            return
        if entry["closure"]:
            self._compare_gradients(_trained(self._subject), entry["gradients"][0], entry["whole"])
        elif self._call != len(entry["gradients"]) and not self.found[-1]["unlike"]:
            self.found[-1]["unlike"] = (
                f"{self._call} optimizer steps in step {entry['step'] + 1}, {len(entry['gradients'])} in the plain run"
            )
        weights = named_weights(self._subject)
        if not _unlike(entry["after"], weights, entry["whole"]):
            rows = _differences(entry["after"], weights, entry["before"], entry["whole"], self._clear)
            self.found[-1]["updates"] = list(rows)
        self._last_after = entry["after"]
        self._entry = None

    def _compare_gradients(
        self, parameters: list[Tensor], theirs: list[Tensor | None], whole: bool, early: Early = NO_EARLY
    ) -> None:
        found = self.found[-1]
        if len(parameters) != len(theirs):
            found["unlike"] = f"{len(parameters)} parameters reached the optimizer, {len(theirs)} in the plain run"
            return
        names = {tensor.data_ptr(): name for name, tensor in named_weights(self._subject).items()}
        for index, (parameter, reference) in enumerate(zip(parameters, theirs, strict=True)):
            name = names.get(own_part(parameter.detach()).data_ptr(), f"parameter {index}")
            mine = _gradient(parameter, whole, index, early)
            if mine is not None and reference is not None:
                found["gradients"].append((name, *_error(reference, mine)))
                if not whole and mine.shape == reference.shape:
                    self._clear[name] = _Clear(index, _clear_of_noise(reference, mine))
            elif mine is not reference:
                found["unlike"] = f"{name} has {'no' if mine is None else 'a'} gradient, unlike the plain run"


Reference = ReferenceWriter | ReferenceReader


def thinned(checks: tuple[int, ...], most: int) -> tuple[int, ...]:
    """At most this many of them: the early ones, unless they would be more than half, and evenly spread others."""
    if most >= len(checks):
        return checks
    early = EARLY_CHECKS if most >= 2 * EARLY_CHECKS else 0
    rest, more = checks[early:], most - early
    return (*checks[:early], *(rest[round(i * (len(rest) - 1) / more)] for i in range(more)))


def _trained(subject: Subject) -> list[Tensor]:
    """The parameters themselves (detached ones have no gradient)."""
    return all_parameters(subject.modules, subject.optimizers)


def _kept(tensors: dict[str, Tensor], whole: bool) -> dict[str, Tensor]:
    """Copies on the host; samples for large models."""
    return {
        name: (tensor.detach().to("cpu", copy=True) if whole else sample(tensor, i))
        for i, (name, tensor) in enumerate(tensors.items())
    }


def _replace(parameter: Tensor, gradient: Tensor | None) -> None:
    """gradient: dense. A sparse one keeps its rows: some optimizers leave the others as they are."""
    import torch

    if gradient is None or parameter.grad is None:
        return
    mine = parameter.grad.detach()
    if mine.is_sparse:
        rows = mine.coalesce().indices()
        values = gradient.to(mine.device, mine.dtype)[tuple(rows)]
        parameter.grad = torch.sparse_coo_tensor(rows, values, mine.shape, is_coalesced=True, check_invariants=True)
    else:
        own_part(mine).copy_(gradient)


def _gradient(parameter: Tensor, whole: bool, index: int, early: Early = NO_EARLY) -> Tensor | None:
    gradient = early.get(id(parameter), parameter.grad)
    if gradient is None:
        return None
    gradient = own_part(gradient.detach())
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return gradient.to("cpu", copy=True) if whole else sample(gradient, index)


def sample(tensor: Tensor, index: int) -> Tensor:
    """SAMPLED_ELEMENTS of its elements, or all, on the host; the same ones in every process, whatever the layout."""
    import torch

    flat = tensor.detach().reshape(-1)
    if flat.numel() > SAMPLED_ELEMENTS:
        generator = torch.Generator().manual_seed(index)
        positions = torch.randint(flat.numel(), (SAMPLED_ELEMENTS,), generator=generator, device="cpu")
        flat = flat[positions.to(flat.device)]
    return flat.to("cpu", copy=True)


def _unlike(theirs: dict[str, Tensor], mine: dict[str, Tensor], whole: bool) -> str:
    """Why the two cannot be compared tensor by tensor; '' if they can."""
    if list(theirs) != list(mine):
        odd = sorted(set(theirs) ^ set(mine))
        return f"other parameters than in the plain run ({', '.join(odd[:3])}{' ...' if len(odd) > 3 else ''})"
    for name, tensor in mine.items():
        if whole and tensor.shape != theirs[name].shape:
            return f"{name} has the shape {tuple(tensor.shape)}, {tuple(theirs[name].shape)} in the plain run"
    return ""


def _differences(
    theirs: dict[str, Tensor],
    mine: dict[str, Tensor],
    since: dict[str, Tensor],
    whole: bool,
    clear: Mapping[str, _Clear] = MappingProxyType({}),
) -> Iterator[TensorRow]:
    """(name, |mine - theirs|, |theirs - since|, one rounding error of theirs) of each tensor; of the elements in
    `clear` alone, where they are the same as the sampled ones."""
    import torch

    for index, (name, tensor) in enumerate(mine.items()):
        reference = theirs.get(name)
        if reference is None or not (reference.is_floating_point() or reference.is_complex()):
            continue
        own = tensor.detach().to("cpu") if whole else sample(tensor, index)
        a, b = _widened(reference), _widened(own)
        moved = a - _widened(since[name]) if name in since else a
        chosen = clear.get(name)
        if (
            chosen is not None
            and (chosen.drawn_by == index or len(a) < SAMPLED_ELEMENTS)
            and len(chosen.elements) == len(a)
        ):
            a, b, moved = (one[chosen.elements] for one in (a, b, moved))
        rounding = torch.finfo(reference.dtype).eps * _size(a)
        yield name, _size_of_difference(a, b), _size(moved), rounding


def _clear_of_noise(reference: Tensor, mine: Tensor) -> Tensor:
    """bool, like the gradients: where they are much larger than their difference is on average."""
    a, b = _widened(reference), _widened(mine)
    return a.abs() > CLEAR_OF_NOISE * (b - a).abs().square().mean().sqrt()


def _error(reference: Tensor, mine: Tensor) -> tuple[float, float, float]:
    """(|mine - reference|, |reference|, <mine, reference>); zeros where the reference is not finite, as under a loss
    scale that is too large: it says nothing."""
    import torch

    a, b = _widened(reference).reshape(-1), _widened(mine).reshape(-1)
    size = float(a.norm())
    if not math.isfinite(size) and not a.isfinite().all():
        return 0.0, 0.0, 0.0
    if mine.shape != reference.shape:
        return math.inf, size, 0.0
    error = float((b - a).norm())
    if not math.isfinite(error) and not b.isfinite().all():
        return math.inf, size, 0.0
    widest = torch.promote_types(a.dtype, torch.float64)
    return error, size, float(torch.vdot(a.to(widest), b.to(widest)).real)


def _widened(tensor: Tensor) -> Tensor:
    """In fp32 at least."""
    import torch

    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _size(tensor: Tensor) -> float:
    """The norm of its finite elements: a mask may hold -inf."""
    size = float(tensor.norm())
    return size if math.isfinite(size) else float(tensor.masked_fill(~tensor.isfinite(), 0).norm())


def _size_of_difference(a: Tensor, b: Tensor) -> float:
    """|b - a|, where equal infinities differ by 0; inf where it is no number."""
    size = float((b - a).norm())
    if not math.isfinite(size):
        size = float((b - a).masked_fill((a == b) | (a.isnan() & b.isnan()), 0).norm())
    return math.inf if math.isnan(size) else size


def _flat(value: object) -> Iterator[bytes]:
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _flat(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif hasattr(value, "numpy") and hasattr(value, "cpu"):
        yield value.cpu().numpy().tobytes()
    elif hasattr(value, "tobytes"):
        yield value.tobytes()
    else:
        yield repr(value).encode()
