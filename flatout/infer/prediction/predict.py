"""Run a model on many inputs: ragged, streamed, in order, close to what the machine can do.

    for output in flatout.predict(model, inputs, flatout.Plan(precision="bf16")):
        ...                                               # in the order of the inputs, as they are ready

    predictions = flatout.predict(model, inputs)
    outputs = predictions.collect()                       # a list
    predictions.figures.share_of_ceiling                  # and padding_share, tokens_per_second, ...

Inputs are read ahead by a bounded window, sorted by length and put into batches of so many tokens, without padding
where the model is found to allow it (allowed.py), one by one where it allows nothing else. An input that cannot be used
gives a `Failed` in its place, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.types import Device
from torch.utils.data import DataLoader

from flatout.arguments import as_plan, as_whole_number
from flatout.errors import UsageError
from flatout.infer.prediction.batching import WINDOW_BATCHES, WINDOW_ITEMS, Bounds, windows
from flatout.infer.prediction.placed import place
from flatout.infer.prediction.predicted import Failed, Figures
from flatout.infer.prediction.samples import Sample, read_sample
from flatout.infer.prediction.window_run import Counts, WindowRun
from flatout.infer.progress_bar import progress_bar
from flatout.levers.applied import Applied
from flatout.levers.catalogue import levers_of
from flatout.levers.lever import choices_of_plan
from flatout.levers.subject import Subject
from flatout.machine.detect import detect
from flatout.machine.device import device_name
from flatout.machine.kept_ceilings import load_ceilings
from flatout.plan import Plan

Output: TypeAlias = Any  # what the user's model returns
BATCH_TOKENS_CPU = 2048
"""More does not make products faster on a CPU, and activations no longer fit in the cache."""
BATCH_TOKENS_CUDA = 16384
RESULTS_PER_LOOK = 64
"""Between two looks at the figures for the bar."""


def predict(
    model: nn.Module,
    inputs: Iterable[object],
    plan: Plan | None = None,
    *,
    batch_size: int | None = None,
    look_ahead: int | None = None,
    device: Device = None,
    check_finite: bool = False,
    on_error: str = "mark",
    progress: bool = False,
) -> Predictions:
    """Run `model` on every input; iterate over the outputs, or `collect()` them.

    inputs: tensors, arrays, lists of token ids, dicts (keywords) or tuples (arguments), without a batch dimension;
    any iterable, read as it goes; where it raises, the outputs of the inputs before come first. An output is what the
    model returns for that input without the batch dimension, on the CPU, under a plan's precision in the dtype of the
    model's own weights; where it holds values other than tensors that depend on the input, inputs are run one by one.
    The model itself is not changed: a copy runs, as the plan says. An autocast around the call does not apply.
    A model that is on several ranks: call it on each of them, with the same inputs; each gets all outputs.

    plan: precision, weights (on a GPU only int8, with activations), activations, batching, batch_tokens (2048 on a CPU,
    16384 on a GPU), memory_format, fold_batch_norm, compile, matmul_precision, cudnn_benchmark, threads,
    flush_denormals; others are refused (`plan.part_for("predict")` drops them). batch_size: of inputs of fixed size,
    such as images and vectors of numbers (32; of small ones as many as hold batch_tokens numbers).
    look_ahead: the most inputs held in memory with their outputs (4096, and no more than 16 batches' tokens, or 2
    batches of inputs of fixed size).
    check_finite: an output with inf or NaN counts as failed. on_error: "mark" puts a `Failed` in the place of a
    result, "raise" ends the run with a UsageError that names the input. progress: a bar on the terminal's stderr.

    Raises UsageError for an argument that is not a module or not iterable, PlanError for contradicting choices.
    """
    predictor = Predictor(
        model, plan, batch_size=batch_size, look_ahead=look_ahead, device=device, check_finite=check_finite
    )
    return predictor(inputs, on_error=on_error, progress=progress)


class Predictor:
    """A model prepared once for several runs: the same arguments as `predict`; call it with inputs. Threads may share
    it: their windows take turns."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        *,
        batch_size: int | None = None,
        look_ahead: int | None = None,
        device: Device = None,
        check_finite: bool = False,
    ) -> None:
        self.plan = as_plan(plan, "predict")
        batch_size = None if batch_size is None else as_whole_number(batch_size, "batch_size")
        look_ahead = None if look_ahead is None else as_whole_number(look_ahead, "look_ahead")
        placed = place(model, self.plan, device)
        usual = BATCH_TOKENS_CUDA if placed.device.type == "cuda" else BATCH_TOKENS_CPU
        batch_tokens = self.plan.batch_tokens or usual
        self.bounds = Bounds(
            batch_tokens=batch_tokens,
            batch_size=batch_size,
            window_tokens=batch_tokens * WINDOW_BATCHES,
            window_items=look_ahead or WINDOW_ITEMS,
        )
        self.ceilings = load_ceilings(detect(), device_name(placed.device))
        """Of its device, measured before; None: never."""
        self.run = WindowRun(placed, self.plan, self.bounds, check_finite=check_finite)

    def __call__(
        self,
        inputs: Iterable[object],
        *,
        on_error: str = "mark",
        first_index: int = 0,
        progress: bool = False,
        total: int | None = None,
    ) -> Predictions:
        """Outputs of these inputs. `first_index`: the number of the first, where earlier ones were done before.

        `progress`: with a bar on the terminal's stderr; `total`: how many inputs there are, if they do not say.
        """
        source = as_inputs(inputs)
        if on_error not in ("mark", "raise"):
            raise UsageError(f"on_error is {on_error!r}", limit="it is 'mark' or 'raise'")
        predictions = Predictions(self, source, on_error=on_error, first_index=first_index)
        if progress:
            predictions.show_progress(_count(inputs) if total is None else total)
        return predictions


class Predictions:
    """Outputs in the order of the inputs, as an iterator. `figures` reports the progress."""

    def __init__(self, predictor: Predictor, inputs: Iterable[object], *, on_error: str, first_index: int) -> None:
        self._predictor, self._run = predictor, predictor.run
        self._on_error, self._next = on_error, first_index
        self._source = iter(inputs)
        self._sequences = False
        self._items = self._failed = 0
        self._seconds = 0.0
        self._counts = Counts()
        self._ready = self._in_order()

    def __iter__(self) -> Iterator[Output]:
        return self

    def __next__(self) -> Output:
        return next(self._ready)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Raises UsageError: as any iterator, it is in the middle of something."""
        raise UsageError(
            "Predictions cannot be copied or pickled",
            limit="they are made as they are read",
            remedy="copy or pickle the outputs: predictions.collect()",
        )

    def show_progress(self, total: int | None) -> None:
        """Show a progress bar on stderr from now on, for `total` inputs (None: unknown)."""
        self._ready = self._with_bar(self._ready, total)

    def collect(self) -> list[Output]:
        """The remaining outputs as a list: they must all fit into memory."""
        return list(self)

    @property
    def figures(self) -> Figures:
        """Of what was done so far."""
        run, counts = self._run, self._counts
        rate = run.runner.placed.rate
        ceilings = self._predictor.ceilings
        peak = ceilings.gemm_flops_per_second.get(rate) if ceilings is not None else None
        return Figures(
            items=self._items,
            failed=self._failed,
            tokens=counts.tokens,
            sequences=self._sequences,
            computed_tokens=counts.computed_tokens,
            batches=dict(counts.batches),
            seconds=self._seconds,
            flops=counts.flops,
            ceiling_flops_per_second=None if peak is None else peak.value,
            ceiling_dtype=rate,
            splits=counts.splits,
            graphs=None if run.compiled is None else run.compiled.versions,
            notes=tuple(run.notes),
        )

    def _in_order(self) -> Iterator[object]:
        bounds = self._predictor.bounds
        for window in windows(self._read(), lambda one: _weight(one, bounds), bounds):
            samples = [one for one in window if isinstance(one, Sample)]
            self._sequences = self._sequences or any(one.is_sequence for one in samples)
            with self._run.lock, self._as_planned(), self._run.runner.placed.evaluating(), torch.no_grad():
                start = time.perf_counter()
                results = self._run.run(samples, self._counts)
            results |= {one.index: one for one in window if isinstance(one, Failed)}
            self._seconds += time.perf_counter() - start
            for one in window:
                result = results.pop(one.index)
                self._items += 1
                if isinstance(result, Failed):
                    self._failed += 1
                    if self._on_error == "raise":
                        raise result.error(f"input {result.index}")
                yield result

    def _with_bar(self, results: Iterator[object], total: int | None) -> Iterator[object]:
        with progress_bar(total) as show:
            for number, result in enumerate(results):
                if number % RESULTS_PER_LOOK == 0:
                    show(number, self.figures.in_short())
                yield result

    def _read(self) -> Iterator[Sample | Failed]:
        calling = self._run.runner.calling
        while True:
            start = time.perf_counter()
            try:
                value = next(self._source)
            except StopIteration:
                return
            index, self._next = self._next, self._next + 1
            try:
                found: Sample | Failed = read_sample(index, value, calling)
            except UsageError as error:
                found = Failed.by(index, error)
            self._seconds += time.perf_counter() - start
            yield found

    @contextlib.contextmanager
    def _as_planned(self) -> Iterator[None]:
        """Settings of the process are restored before a result is returned; the precision is the plan's, not that of an
        autocast around the call."""
        levers = [lever for lever in levers_of("predict") if lever.of_process]
        choices = choices_of_plan(self._predictor.plan.choices(), levers)
        applied = Applied(Subject())
        # Two threads that set and restore in turns would leave one's settings behind.
        with _PROCESS if choices else contextlib.nullcontext():
            applied.set(choices)
            try:
                with torch.autocast(self._run.runner.placed.device.type, enabled=False):
                    yield
            finally:
                applied.set([])


_PROCESS = threading.RLock()
"""Held while a plan's settings of the whole process are on."""


def _count(inputs: object) -> int | None:
    """None where it is not known: a DataLoader has a length, and raises if its dataset has none."""
    try:
        return len(inputs) if isinstance(inputs, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def as_inputs(inputs: object, name: str = "inputs") -> Iterable[object]:
    """What yields the inputs one by one. UsageError for what does not; name: what the user called it."""
    kind, limit = type(inputs).__name__, "predict takes an iterable of inputs"
    if isinstance(inputs, Mapping):
        what = f"{name} is a {kind} of {', '.join(map(repr, list(inputs)[:3]))}"
        remedy = "for one input: [input]; for columns: [dict(zip(columns, row)) for row in zip(*columns.values())]"
        raise UsageError(what, limit=f"{limit}, each of which may be a dict", remedy=remedy)
    if isinstance(inputs, DataLoader) and inputs.batch_sampler is not None:
        limit = "predict takes single inputs, without a batch dimension, and makes the batches"
        raise UsageError(f"{name} is a {kind}, which gives batches", limit=limit, remedy="pass its dataset")
    number = getattr(inputs, "ndim", 1) == 0  # a tensor or array with the methods of an iterable
    if not number and not isinstance(inputs, str | bytes):
        if isinstance(inputs, Iterable):
            return inputs
        if hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__"):  # a map-style dataset
            return (inputs[place] for place in range(len(inputs)))
    what = f"{name} is {kind}{' of a single number' if number else ''}"
    raise UsageError(what, limit=f"{limit}, each without a batch dimension", remedy="for one: [input]")


def _weight(one: Sample | Failed, bounds: Bounds) -> int:
    """What a sample takes of the window's tokens. Two batches of a fixed size (images) fill it: nothing is gained by
    sorting them, and each may be large."""
    if isinstance(one, Failed):
        return 0
    if one.length is not None:
        return one.length
    return -(-bounds.window_tokens // (2 * bounds.size_of_batch(one.numbers)))
