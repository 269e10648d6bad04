"""One window of samples through a model: batches formed, run, split where the memory ends or a sample is bad.

Whatever fails is looked for by halves: the batch is run again in two parts, and so on, until one sample is found alone
with its error. It becomes a `Failed` in the place of its result; the others are not lost.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.data.nested import leaves_in
from flatout.errors import UsageError
from flatout.infer.prediction.allowed import Allowed, try_batchings
from flatout.infer.prediction.batching import Bounds, batches_of, bucket_length
from flatout.infer.prediction.calling import calling_of
from flatout.infer.prediction.compiled import CompiledModel
from flatout.infer.prediction.model_batch import Batching, Runner
from flatout.infer.prediction.packing import row_length
from flatout.infer.prediction.placed import Placed, fold, round_and_pack
from flatout.infer.prediction.predicted import Failed
from flatout.infer.prediction.samples import Sample
from flatout.levers.compile import repeated_blocks
from flatout.memory.out_of_memory import is_out_of_memory
from flatout.plan import Plan
from flatout.train.flops import count_step

HOPELESS = 16
"""After so many samples that failed one by one, and none that did not, the fault is not theirs."""


class WindowRun:
    """Runs windows of one model, and remembers what it learnt about it on the way."""

    def __init__(self, placed: Placed, plan: Plan, bounds: Bounds, *, check_finite: bool) -> None:
        self.plan, self.bounds, self.check_finite = plan, bounds, check_finite
        self.runner = Runner(placed, calling_of(placed.model))
        self.notes = placed.notes
        self.batches: Counter[str] = Counter()
        self.tokens = self.computed_tokens = self.splits = self.succeeded = self.failed_alone = 0
        self.flops: float | None = 0.0
        self.batch_tokens, self.batch_size = bounds.batch_tokens, bounds.batch_size
        self.compiled: CompiledModel | None = None
        self._prepared = False
        self._allowed: dict[Hashable, Allowed | None] = {}
        self._flops_of: dict[Hashable, dict[int, float]] = {}

    def run(self, samples: Sequence[Sample]) -> dict[int, Any]:
        """Results or `Failed` by index. Raises UsageError or the model's own error where no sample ever worked."""
        results: dict[int, Any] = {}
        by_kind: dict[Hashable, list[Sample]] = {}
        for sample in samples:
            by_kind.setdefault(sample.kind, []).append(sample)
        for kind, members in by_kind.items():
            self._prepare(members)
            how = self._choose(kind, members)
            for batch in self._batches(members, how):
                self._run_batch(batch, how, results)
        return results

    # learning about the model

    def _prepare(self, samples: Sequence[Sample]) -> None:
        """Once, on the first samples: fold, round, pack, compile."""
        if self._prepared:
            return
        self._prepared = True
        placed = self.runner.placed
        if self.plan.fold_batch_norm:
            try:
                fold(placed, lambda: self.runner.run(samples[:1], "equal"))
            except Exception as error:  # a bad first sample
                self.notes.append(f"batch norms were not folded: {Failed.by(0, error).what}")
        round_and_pack(placed, self.plan)
        self.runner.blocks = repeated_blocks(placed.model)

    def _compile(self) -> None:
        if self.plan.compile is not None and self.compiled is None:
            model, device = self.runner.placed.model, self.runner.placed.device.type
            self.compiled = CompiledModel(model, self.plan.compile, device=device)
            self.runner.call = self.compiled

    def _choose(self, kind: Hashable, samples: Sequence[Sample]) -> Batching:
        """What the plan wants and the model allows. Tried once for each kind of sample, uncompiled."""
        call, self.runner.call = self.runner.call, None
        try:
            self._learn_flops(kind, samples)
            if self._allowed.get(kind) is None and self.plan.batching != "equal":
                self._allowed[kind] = self._try(samples)
        finally:
            self.runner.call = call
        self._compile()
        allowed = self._allowed.get(kind)
        if allowed is None:
            return "equal"
        how, reason = allowed.choose(self.plan.batching)
        if reason and (note := f"batches are {how}: {reason}") not in self.notes:
            self.notes.append(note)
        return how

    def _try(self, samples: Sequence[Sample]) -> Allowed | None:
        try:
            return try_batchings(self.runner, samples, packing=self.plan.compile is None)
        except Exception:  # one of the chosen samples is bad: the batches will say which; the next window tries again
            return None

    def _learn_flops(self, kind: Hashable, samples: Sequence[Sample]) -> None:
        """Operations of one sample alone, at two lengths at most: they grow as a * length + b * length^2."""
        known = self._flops_of.setdefault(kind, {})
        lengths = {sample.tokens: sample for sample in samples}
        for length in sorted({min(lengths), max(lengths)} - set(known))[: 2 - len(known)]:
            finish = count_step(_formulas())
            try:
                self.runner.run([lengths[length]], "equal")
            except Exception:  # a bad sample
                finish()
                continue
            known[length] = finish().flops

    def _flops(self, sample: Sample) -> float | None:
        known = self._flops_of.get(sample.kind) or {}
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

    # batches

    def _batches(self, samples: Sequence[Sample], how: Batching) -> list[list[Sample]]:
        groups: list[list[Sample]] = [list(samples)]
        if how == "equal":
            groups = _grouped(samples, lambda sample: sample.shape)
        elif self.compiled is not None:
            groups = _grouped(samples, lambda sample: self._bucket(sample.tokens))
        found = []
        for group in groups:
            fixed = group[0].length is None
            found += batches_of(
                group,
                lambda sample: sample.tokens,
                max_tokens=len(group) if fixed else self.batch_tokens,
                max_size=self.batch_size if fixed or self.batch_size < self.bounds.batch_size else None,
                padded=how == "padded",
            )
        return found

    def _bucket(self, length: int) -> int:
        longest = self.runner.calling.longest
        return bucket_length(length) if longest is None else min(bucket_length(length), max(longest, length))

    def _filled_shape(self, batch: Sequence[Sample], how: Batching) -> tuple[int | None, int | None]:
        """(rows, tokens) of a compiled batch: one shape for each bucket, whatever the number of samples."""
        if self.compiled is None or self.compiled.gave_up is not None:
            return None, None
        longest = max(sample.tokens for sample in batch)
        if batch[0].length is None:
            return self.batch_size, None
        tokens = self._bucket(longest) if how == "padded" else longest
        return max(len(batch), self.batch_tokens // tokens), tokens if how == "padded" else None

    def _run_batch(self, batch: list[Sample], how: Batching, results: dict[int, Any]) -> None:
        half = len(batch) // 2
        if half and self._exceeds(batch):  # memory ended at such a size before
            self._run_batch(batch[:half], how, results)
            self._run_batch(batch[half:], how, results)
            return
        try:
            outputs = self._outputs(batch, how)
            failure = None
        except Exception as error:
            failure = error.with_traceback(None)  # its frames hold the tensors that did not fit
        if failure is not None:  # outside of the handler, which would keep them too
            self._after(failure, batch, how, results)
            return
        self.succeeded += len(batch)
        for sample, output in zip(batch, outputs, strict=True):
            results[sample.index] = self._checked(sample, output)

    def _exceeds(self, batch: Sequence[Sample]) -> bool:
        if len(batch) > self.batch_size and self.batch_size < self.bounds.batch_size:
            return True
        shrunk = self.batch_tokens < self.bounds.batch_tokens and batch[0].length is not None
        return shrunk and sum(sample.tokens for sample in batch) > self.batch_tokens

    def _outputs(self, batch: list[Sample], how: Batching) -> list[Any]:
        rows, tokens = self._filled_shape(batch, how)
        with torch.no_grad():
            output = self.runner.run(batch, how, rows=rows, tokens=tokens)
            found = self.runner.cut(output, batch, padded=how != "equal")
        lengths = [sample.tokens for sample in batch]
        ragged = len(set(lengths)) > 1
        self.batches[how if ragged else "equal"] += 1
        self.tokens += sum(lengths)
        self.computed_tokens += _computed(lengths, how if ragged else "equal", rows, tokens)
        for sample in batch:
            flops = self._flops(sample)
            self.flops = None if flops is None or self.flops is None else self.flops + flops
        if self.compiled is not None and self.compiled.gave_up and self.compiled.gave_up not in self.notes:
            self.notes.append(self.compiled.gave_up)
        return found

    def _after(self, error: Exception, batch: list[Sample], how: Batching, results: dict[int, Any]) -> None:
        """Two halves again; a single sample is given up."""
        no_memory = is_out_of_memory(error)
        if no_memory:
            self.splits += 1
            if self.runner.placed.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
        if len(batch) > 1:
            half = len(batch) // 2
            if no_memory:  # later batches need not fail first
                self.batch_tokens = min(self.batch_tokens, max(1, sum(sample.tokens for sample in batch) // 2))
                self.batch_size = min(self.batch_size, half)
            for part in (batch[:half], batch[half:]):
                self._run_batch(part, how, results)
            return
        (sample,) = batch
        self.failed_alone += 1
        if self.failed_alone >= HOPELESS and not self.succeeded:
            raise UsageError(
                f"the model failed on each of the first {self.failed_alone} inputs: {Failed.by(0, error).what}",
                limit="predict calls it with a batch of inputs",
                remedy="try model(batch) on one of them by hand",
            ) from error
        remedy = "cut it, or give the run more memory" if no_memory else ""
        failed = Failed.by(sample.index, error)
        results[sample.index] = Failed(
            index=sample.index, what=failed.what, limit=failed.limit, remedy=failed.remedy or remedy
        )

    def _checked(self, sample: Sample, output: Any) -> Any:
        if not self.check_finite:
            return output
        for path, leaf in leaves_in(output, "output", lambda leaf: isinstance(leaf, Tensor)):
            if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                count = int((~leaf.isfinite()).sum())
                what = f"{path} has {count} of {leaf.numel()} values that are inf or NaN"
                remedy = "try a plan with precision = 'fp32'" if self.plan.precision in ("bf16", "fp16") else ""
                return Failed(index=sample.index, what=what, limit="finite values were asked for", remedy=remedy)
        return output


def _computed(lengths: Sequence[int], how: Batching, rows: int | None, tokens: int | None) -> int:
    """Tokens that the model ran on, padding included."""
    if how == "packed":
        return row_length(sum(lengths))
    return (rows or len(lengths)) * (tokens or max(lengths))


def _grouped(samples: Sequence[Sample], key: Any) -> list[list[Sample]]:
    groups: dict[Hashable, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    return list(groups.values())


def _formulas() -> dict[Any, Any]:
    """Operations of oneDNN's products, which torch's counter does not know."""
    found: dict[Any, Any] = {}

    def product(x: Any, weight: Any) -> int:
        return 2 * int(torch.Size(x).numel()) * (weight[0] if weight[1] == x[-1] else weight[1])

    packed = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if packed is not None:
        found[packed] = lambda x, weight, *_: product(x, weight)
    whole = getattr(torch.ops.onednn, "qlinear_pointwise", None)
    if whole is not None:
        found[whole] = lambda x, x_scale, x_zero, weight, *_: product(x, weight)
    return found
