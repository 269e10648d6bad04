"""One window of samples through a model: batches formed, run, split where memory runs out or a sample fails.

Failures are found by bisection: the batch is run again in two halves, and so on, until a single sample fails. It
becomes a `Failed` in place of its result; the others are not lost.

How samples are batched was tested before (allowed.py) and is checked during the run (agreement.py). A batch that is
found wrong before any of its kind was returned is run again, sample by sample; later it ends the run.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import torch

from flatout.errors import MachineError, UsageError, describe_error
from flatout.flops import count_step
from flatout.infer.left_unchanged import left_unchanged
from flatout.infer.output_tensors import output_tensors
from flatout.infer.prediction.agreement import Agreement, Audit, Mismatch
from flatout.infer.prediction.allowed import Allowed, Trial
from flatout.infer.prediction.batching import Bounds, batches_of, bucket_length
from flatout.infer.prediction.calling import calling_of
from flatout.infer.prediction.compiled import CompiledModel
from flatout.infer.prediction.model_batch import Batching, Layout, Runner
from flatout.infer.prediction.packing import row_length
from flatout.infer.prediction.placed import Placed
from flatout.infer.prediction.predicted import Failed
from flatout.infer.prediction.preparing import OWN_LAYERS, prepare, why_depends_on_more
from flatout.infer.prediction.samples import Sample, check_in_vocabulary, whole_numbers_hint
from flatout.levers.compile import repeated_blocks
from flatout.memory.out_of_memory import is_out_of_memory
from flatout.plan import Plan
from flatout.plan_document import short
from flatout.torch_private.lookup import is_missing
from flatout.torch_private.tensors import onednn_linear

if TYPE_CHECKING:
    from flatout.flops import Packet

HOPELESS = 16
"""After this many failures and no success, the model is at fault, not the samples."""
FEW = 4
"""Fewer samples of a kind are run one by one: trying what the model allows would take longer."""


@dataclass
class Kind:
    """What was learnt about one kind of sample."""

    agreement: Agreement
    seen: int = 0
    allowed: Allowed | None = None
    layout: Layout = field(default_factory=Layout)
    layout_tried: bool = False
    batched: bool = False
    """Whether results of batches were returned."""


@dataclass
class Counts:
    """What was done for some inputs; see Figures."""

    tokens: int = 0
    computed_tokens: int = 0
    batches: Counter[str] = field(default_factory=Counter)
    flops: float | None = 0.0
    splits: int = 0


class WindowRun:
    """Runs windows of one model, and remembers what it learns about it."""

    def __init__(self, placed: Placed, plan: Plan, bounds: Bounds, *, check_finite: bool) -> None:
        self.plan, self.bounds, self.check_finite = plan, bounds, check_finite
        self.lock = threading.Lock()
        """One window at a time: threads may share a predictor, and a window hooks and learns about the one copy."""
        self.runner = Runner(placed, calling_of(placed.model))
        self.notes = placed.notes
        self.succeeded = self.failed_alone = 0
        self.batch_tokens = bounds.batch_tokens
        self.batch_limit: int | None = None
        """Inputs of fixed size that a batch may hold since memory ran out; None: it never did."""
        self.compiled: CompiledModel | None = None
        self.audit = Audit(self.runner)
        self._prepared = False
        self._in_order: str | None = None
        """Why samples are run one by one as they come; '' = they need not be; None: not yet known."""
        self._kinds: dict[Hashable, Kind] = {}
        self._operations = Operations()
        self._counts = Counts()

    def run(self, samples: Sequence[Sample], counts: Counts) -> dict[int, object]:
        """Results or `Failed` by index; call it with `lock` held. Adds to `counts`. Raises UsageError where no sample
        ever worked, or where results that were returned before are in doubt."""
        self._counts = counts
        results: dict[int, object] = {}
        if not samples:
            return results
        self._prepare(samples)
        if self._in_order or (self._in_order is None and len(samples) < FEW):
            for sample in samples:
                self.runner.layout = self._kind(sample).layout
                self._run_batch([sample], "alone", results)
            return results
        for members in _grouped(samples, lambda sample: sample.kind):
            self._run_kind(self._kind(members[0]), members, results)
        return results

    def _run_kind(self, kind: Kind, members: list[Sample], results: dict[int, object]) -> None:
        self.runner.layout = kind.layout
        how = self._choose(kind, members)
        before = copy.deepcopy(self._counts)
        try:
            for batch in self._batches(members, how):
                self._run_batch(batch, how, results)
        except Mismatch as found:
            self._distrust(kind, found)
            before.splits = self._counts.splits
            vars(self._counts).update(vars(before))  # what is done again counts once
            for sample in members:
                self._run_batch([sample], "alone", results)
            return
        kind.batched = kind.batched or how != "alone"

    def _kind(self, sample: Sample) -> Kind:
        return self._kinds.setdefault(sample.kind, Kind(Agreement(self.runner.placed.rate)))

    def _distrust(self, kind: Kind, found: Mismatch) -> None:
        """From now on each of this kind alone; UsageError where results of batches were returned already."""
        if kind.batched:
            alone = "Plan(batch_tokens=1)" if found.sample.length is not None else "batch_size=1"
            raise UsageError(
                str(found),
                limit="earlier results of batches may be wrong too, although those that were checked were right",
                remedy=f"run all of it again, each input alone: {alone} (from the command line with --restart)",
            ) from found
        assert kind.allowed is not None, "nothing is batched before it was tried"
        kind.allowed = kind.allowed.only_alone(str(found))
        self._say_alone(kind.allowed.reasons["equal"])

    # learning about the model

    def _prepare(self, samples: Sequence[Sample]) -> None:
        """Once there are enough samples: do results depend on their own input alone? The first time: fold, round,
        pack."""
        if self._in_order is None and (len(samples) >= FEW or (self.plan.fold_batch_norm and not self._prepared)):
            self._in_order = why_depends_on_more(self.runner, samples)
            if self._in_order:
                self._say_alone(self._in_order)
        if self._prepared:
            return
        self._prepared = True
        prepare(self.runner, self.plan, samples, fold=not self._in_order)
        if not self.runner.placed.has_stages:  # packed rows need all blocks here
            self.runner.blocks = repeated_blocks(self.runner.placed.model)

    def _choose(self, kind: Kind, samples: Sequence[Sample]) -> Batching:
        """What the plan asks for and the model allows; tried uncompiled, and again for lengths outside those tried."""
        kind.seen += len(samples)
        most = self._most(samples[0]) if samples[0].length is None else self.bounds.batch_tokens
        one_by_one = most == 1 and self.plan.compile is None  # any batch would hold one sample only
        if kind.allowed is None and (kind.seen < FEW or one_by_one):
            return "alone"
        call, self.runner.call = self.runner.call, None
        try:
            self._try(kind, samples)
        finally:
            self.runner.call = call
        if self.plan.compile is not None and self.compiled is None:
            placed = self.runner.placed
            self.compiled = self.runner.call = CompiledModel(placed.model, self.plan.compile, device=placed.device.type)
        if kind.allowed is None:
            return "alone"
        how, reason = kind.allowed.choose(self.plan.batching)
        if how == "alone":
            self._say_alone(reason)
        elif reason and (note := f"batches are {how}: {reason}") not in self.notes:
            self.notes.append(note)
        return how

    def _try(self, kind: Kind, samples: Sequence[Sample]) -> None:
        with contextlib.suppress(Exception):  # a bad sample: its batch will report it
            self._operations.learn(samples, lambda sample: self.runner.run([sample], "alone"))
        trial = Trial(self.runner, kind.agreement, self.bounds.batch_tokens)
        if kind.allowed is None:
            kind.allowed = trial.equal(samples)
            kind.layout = self.runner.layout
        if kind.allowed is None or self.plan.batching == "equal" or samples[0].length is None:
            return
        if not kind.allowed.covers(sorted(sample.tokens for sample in samples)):
            kind.allowed = trial.ragged(kind.allowed, samples, packing=self.plan.compile is None)

    def _learn_layout(self, sample: Sample) -> bool:
        """For a model whose output for one sample has no leading dimension of 1; True if anything was learnt."""
        kind = self._kind(sample)
        if kind.layout_tried or kind.allowed is not None:
            return False
        kind.layout_tried = True
        with left_unchanged(self.runner.placed.model, besides=OWN_LAYERS):
            Trial(self.runner, kind.agreement, self.bounds.batch_tokens).layout(sample)
        kind.layout = self.runner.layout
        return True

    def _say_alone(self, reason: str) -> None:
        if (note := f"inputs are run one by one: {reason}") not in self.notes:
            self.notes.append(note)

    # batches

    def _batches(self, samples: Sequence[Sample], how: Batching) -> list[list[Sample]]:
        groups: list[list[Sample]] = [list(samples)]
        if how == "alone":
            return [[sample] for sample in samples]
        if how == "equal":
            groups = _grouped(samples, lambda sample: sample.shape)
        elif self.compiled is not None:
            groups = _grouped(samples, lambda sample: self._bucket(sample.tokens))
        found = []
        for group in groups:
            most = self._most(group[0])
            found += batches_of(
                group,
                lambda sample: sample.tokens,
                max_tokens=self.batch_tokens if most is None else len(group),
                max_size=most,
                padded=how == "padded",
            )
        return found

    def _most(self, sample: Sample) -> int | None:
        """Samples like this one in one batch; None: as many as their tokens allow."""
        if sample.length is not None:
            return None
        size = self.bounds.size_of_batch(sample.numbers)
        return size if self.batch_limit is None else min(size, self.batch_limit)

    def _bucket(self, length: int) -> int:
        longest = self.runner.calling.longest
        return bucket_length(length) if longest is None else min(bucket_length(length), max(longest, length))

    def _filled_shape(self, batch: Sequence[Sample], how: Batching) -> tuple[int | None, int | None]:
        """(rows, tokens) of a compiled batch: one shape for each bucket, whatever the number of samples."""
        if self.compiled is None or self.compiled.gave_up is not None:
            return None, None
        longest = max(sample.tokens for sample in batch)
        if batch[0].length is None:
            return self._most(batch[0]), None
        tokens = self._bucket(longest) if how == "padded" else longest
        return max(len(batch), self.batch_tokens // tokens), tokens if how == "padded" else None

    def _run_batch(self, batch: list[Sample], how: Batching, results: dict[int, object]) -> None:
        half = len(batch) // 2
        if half and self._exceeds(batch):  # memory ran out at such a size before
            self._run_batch(batch[:half], how, results)
            self._run_batch(batch[half:], how, results)
            return
        start = time.perf_counter()
        try:
            outputs = self._outputs(batch, how)
            failure = None
        except Exception as error:
            failure = error.with_traceback(None)  # its frames hold the tensors that did not fit
        if failure is not None:  # outside of the handler, which would keep them too
            self._after(failure, batch, how, results)
            return
        self.audit.batch_seconds += time.perf_counter() - start
        compiled = self.compiled is not None and self.compiled.gave_up is None
        self.audit.check(batch, how, outputs, self._kind(batch[0]).agreement, compiled=compiled)
        self.succeeded += len(batch)
        for sample, output in zip(batch, outputs, strict=True):
            results[sample.index] = self._checked(sample, output)

    def _exceeds(self, batch: Sequence[Sample]) -> bool:
        if batch[0].length is None:
            return self.batch_limit is not None and len(batch) > self.batch_limit
        shrunk = self.batch_tokens < self.bounds.batch_tokens
        return shrunk and sum(sample.tokens for sample in batch) > self.batch_tokens

    def _outputs(self, batch: list[Sample], how: Batching) -> list[object]:
        rows, tokens = (None, None) if how == "alone" else self._filled_shape(batch, how)
        with torch.no_grad():
            if how == "alone":
                output = self._operations.counted(batch[0], lambda sample: self.runner.run([sample], how))
            else:
                output = self.runner.run(batch, how, rows=rows, tokens=tokens)
            try:
                found = self.runner.cut(output, batch, padded=how in ("packed", "padded"), rows=rows)
            except UsageError:
                if how != "alone" or not self._learn_layout(batch[0]):
                    raise
                found = self.runner.cut(output, batch, padded=False)
        lengths = [sample.tokens for sample in batch]
        ragged = len(set(lengths)) > 1
        done = how if ragged or how == "alone" else "equal"
        counts = self._counts
        counts.batches[done] += 1
        counts.tokens += sum(lengths)
        counts.computed_tokens += _computed(lengths, done, rows, tokens)
        for sample in batch:
            flops = self._operations.of(sample)
            counts.flops = None if flops is None or counts.flops is None else counts.flops + flops
        if self.compiled is not None and self.compiled.gave_up and self.compiled.gave_up not in self.notes:
            self.notes.append(self.compiled.gave_up)
        return found

    def _after(self, error: Exception, batch: list[Sample], how: Batching, results: dict[int, object]) -> None:
        """Retry in two halves; give up a single sample."""
        if said := broken_device(self.runner.placed.device):
            raise MachineError(
                f"the GPU failed on inputs {short(sorted(sample.index for sample in batch))}, or just before: {said}",
                limit="CUDA takes no more work of this process",
                remedy="run these with CUDA_LAUNCH_BLOCKING=1, which names the operation that fails",
            ) from error
        no_memory = is_out_of_memory(error)
        if no_memory and self.runner.placed.ranks is not None:
            raise MachineError(
                f"memory ran out on a rank, in a batch of {len(batch)}: {describe_error(error)}",
                limit="ranks that share a model run the same batches",
                remedy="use a smaller batch_size, or batch_tokens in the plan",
            ) from error
        if no_memory:
            self._counts.splits += 1
            if self.runner.placed.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
        if len(batch) > 1:
            half = len(batch) // 2
            if no_memory and batch[0].length is None:  # later batches need not fail first
                self.batch_limit = half if self.batch_limit is None else min(self.batch_limit, half)
            elif no_memory:
                self.batch_tokens = min(self.batch_tokens, max(1, sum(sample.tokens for sample in batch) // 2))
            for part in (batch[:half], batch[half:]):
                self._run_batch(part, how, results)
            return
        (sample,) = batch
        self.failed_alone += 1
        if self.failed_alone >= HOPELESS and not self.succeeded:
            raise UsageError(
                f"the model failed on each of the first {self.failed_alone} inputs: {Failed.by(0, error).what}",
                limit="predict calls it with a batch of inputs",
                remedy=whole_numbers_hint(error, sample) or "try model(batch) on one of them by hand",
            ) from error
        remedy = "cut it, or give the run more memory" if no_memory else whole_numbers_hint(error, sample)
        error = self._plainer(error, sample)
        failed = Failed.by(sample.index, error)
        results[sample.index] = replace(failed, remedy=failed.remedy or remedy)

    def _plainer(self, error: Exception, sample: Sample) -> Exception:
        """An embedding only says that an index is out of range."""
        calling = self.runner.calling
        tokens = next(iter(sample.tensors.values()))
        if isinstance(error, IndexError) and calling.vocabulary is not None and not tokens.is_floating_point():
            try:
                check_in_vocabulary(tokens, calling.vocabulary)
            except UsageError as plainer:
                return plainer
        return error

    def _checked(self, sample: Sample, output: object) -> object:
        if not self.check_finite:
            return output
        for path, leaf in output_tensors(output):
            if leaf.layout is not torch.strided:
                leaf = leaf.to_dense()
            if (leaf.is_floating_point() or leaf.is_complex()) and not bool(leaf.isfinite().all()):
                count = int((~leaf.isfinite()).sum())
                what = f"{path} has {count} of {leaf.numel()} values that are inf or NaN"
                remedy = "try a plan with precision = 'fp32'" if self.plan.precision in ("bf16", "fp16") else ""
                return Failed(index=sample.index, what=what, limit="finite values were asked for", remedy=remedy)
        return output


def broken_device(device: torch.device) -> str:
    """What CUDA says once a kernel has failed, after which it refuses everything; '' for a device that works."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return describe_error(error)
    return ""


def _computed(lengths: Sequence[int], how: Batching, rows: int | None, tokens: int | None) -> int:
    """Tokens that the model ran on, padding included."""
    if how == "packed":
        return row_length(sum(lengths))
    return (rows or len(lengths)) * (tokens or max(lengths))


def _grouped(samples: Sequence[Sample], key: Callable[[Sample], Hashable]) -> list[list[Sample]]:
    groups: dict[Hashable, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    return list(groups.values())


class Operations:
    """How many operations a sample takes on one model, by its kind: counted at two lengths, between them by
    a * length + b * length^2."""

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[int, float]] = {}

    def learn(self, samples: Sequence[Sample], run: Callable[[Sample], object]) -> None:
        """From the shortest and the longest of these, of one kind; `run` calls the model on one."""
        known = self._known.setdefault(samples[0].kind, {})
        lengths = {sample.tokens: sample for sample in samples}
        for length in sorted({min(lengths), max(lengths)} - set(known))[: 2 - len(known)]:
            self.counted(lengths[length], run)

    def counted(self, sample: Sample, run: Callable[[Sample], object]) -> object:
        """Returns what `run` returns; its operations are counted until two lengths are known."""
        known = self._known.setdefault(sample.kind, {})
        if len(known) >= 2 or sample.tokens in known:
            return run(sample)
        finish = count_step(_formulas())
        try:
            output = run(sample)
        except Exception:  # a bad sample: its operations are no measure
            finish()
            raise
        known[sample.tokens] = finish()
        return output

    def of(self, sample: Sample) -> float | None:
        """None where none of its kind could be counted."""
        known = self._known.get(sample.kind) or {}
        if not known:
            return None
        if sample.tokens in known:
            return known[sample.tokens]
        (short, of_short), *others = known.items()
        if not others or sample.length is None:
            return of_short * sample.tokens / short
        ((long, of_long),) = others
        b = (of_long / long - of_short / short) / (long - short)
        return (of_short / short - b * short + b * sample.tokens) * sample.tokens


def _formulas() -> Mapping[Packet, Callable[..., int]]:
    """Operations of oneDNN's products, which torch's counter does not know."""
    found: dict[Packet, Callable[..., int]] = {}

    def product(x: Sequence[int], weight: Sequence[int]) -> int:
        return 2 * int(torch.Size(x).numel()) * (weight[0] if weight[1] == x[-1] else weight[1])

    if not is_missing(onednn_linear):
        found[cast("Packet", onednn_linear)] = lambda x, weight, *_: product(x, weight)
    whole = getattr(torch.ops.onednn, "qlinear_pointwise", None)
    if whole is not None:
        found[whole] = lambda x, x_scale, x_zero, weight, *_: product(x, weight)
    return found
