"""Prediction as a subject for tuning: one run passes the sample of inputs through the model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.types import Device

from flatout.errors import UsageError
from flatout.infer.choosing.closeness import Accuracy, Closeness, scores_of
from flatout.infer.choosing.inference_search import Option, thread_options
from flatout.infer.output_tensors import output_tensors
from flatout.infer.prediction.calling import calling_of
from flatout.infer.prediction.linear import LEAST_WEIGHTS
from flatout.infer.prediction.predict import Predictor, as_inputs
from flatout.infer.prediction.predicted import Failed
from flatout.infer.prediction.samples import read_sample
from flatout.levers.compile import repeated_blocks
from flatout.machine.description import Machine
from flatout.plan import Plan
from flatout.torch_private.modules import BatchNorm

MOST_ITEMS = 4096
"""Of the sample: more are not read."""
FIRST_ITEMS = 32
"""From these the number that fits into the budget is estimated."""
FEW_BATCHES = 8
TIMED_SHARE, JUDGED_SHARE = 1 / 200, 1 / 60
"""Of the budget, for one run of what is timed and of what is judged."""
OUTPUT_BYTES = 512 << 20
"""Of the reference's outputs, which are kept to be compared with."""
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class TunedPrediction:
    """A model and inputs. Raises what `predict` raises, and UsageError where no input can be used."""

    unit = "item"

    def __init__(
        self,
        model: nn.Module,
        inputs: object,
        *,
        budget_seconds: float,
        base: Plan,
        batch_size: int | None = None,
        device: Device = None,
        scores: bool | None = None,
    ) -> None:
        self.model, self.base = model, base
        self._batch_size, self._device = batch_size, device
        self.notes: list[str] = []
        given = list(islice(as_inputs(inputs, "sample_inputs"), MOST_ITEMS))
        if not given:
            raise UsageError("there are no sample inputs", limit="choices are measured on them", remedy="pass some")
        plain = self._predictor(base)
        seconds_each, output_bytes = _measured(plain, given)
        self.inputs = _spread(given, max(1, int(budget_seconds * TIMED_SHARE / seconds_each)))
        judged = min(budget_seconds * JUDGED_SHARE / seconds_each, OUTPUT_BYTES / max(output_bytes, 1))
        self._judged = self.inputs if judged <= len(self.inputs) else _spread(given, int(judged))
        if judged < len(self.inputs):
            self._judged = _spread(self.inputs, max(1, int(OUTPUT_BYTES / max(output_bytes, 1))))
        self.count = len(self.inputs)
        if self.count < len(given):
            self.notes.append(
                f"{self.count} of {len(given)} inputs were timed and {len(self._judged)} judged, to stay within the "
                "budget and the memory"
            )
        self.placed = plain.run.runner.placed
        self.lengths = _lengths(plain, self.inputs)
        filled = sum(self.lengths) / plain.bounds.batch_tokens
        if self.lengths and filled < FEW_BATCHES:
            self.notes.append(
                f"the sample fills {filled:.1f} batches of {plain.bounds.batch_tokens} tokens: compiled ones (which "
                f"are filled up) and larger ones are judged fairly from {FEW_BATCHES} on"
            )
        self._reference = self._exact()
        self.scores, why = self._scores(scores)
        self.notes.append(why)

    @property
    def sample(self) -> str:
        """In words."""
        if not self.lengths:
            return f"{self.count} items of fixed size"
        ragged = f"{min(self.lengths)} to {max(self.lengths)}" if len(set(self.lengths)) > 1 else f"{self.lengths[0]}"
        return f"{self.count} items of {ragged} tokens"

    def make(self, plan: Plan) -> PredictingRunner:
        return PredictingRunner(self._predictor(plan), plan, self)

    def options(self, machine: Machine) -> list[Option]:
        """First what leaves the products as they are, then fewer bits; what has to be compiled comes last."""
        cuda = self.placed.device.type == "cuda"
        own = DTYPES.get(self.placed.result_dtype or self.placed.dtype, "fp32")
        convolutions = any(isinstance(one, nn.Conv2d) for one in self.model.modules())
        norms = any(isinstance(one, BatchNorm) for one in self.model.modules())
        linears = any(type(one) is nn.Linear and one.weight.numel() >= LEAST_WEIGHTS for one in self.model.modules())
        found = [] if cuda else thread_options(machine)
        found += self._batches(cuda)
        if norms:
            found.append(Option(label="batch norms folded", choices={"fold_batch_norm": True}))
        if convolutions:
            found.append(Option(label="channels_last", choices={"memory_format": "channels_last"}))
        if cuda and own == "fp32":
            found.append(Option(label="TF32", choices={"matmul_precision": "high"}))
        for name in ("bf16", "fp16") if cuda else ("bf16",):
            if name != own:
                found.append(Option(label=name, choices={"precision": name}))
        if linears:
            both = {"weights": "int8", "activations": "int8"}
            found.append(Option(label="int8 weights and activations", choices=both))
        if linears and not cuda:  # refused on CUDA, which has no kernel that reads them
            found.append(Option(label="int8 weights", choices={"weights": "int8"}, unless=("activations",)))
        return [*found, *self._compiled(cuda)]

    def judge(self, predictor: Predictor) -> Accuracy:
        """Raises UsageError for an item that fails where fp32 gives an output."""
        closeness = Closeness()
        outputs = predictor(self._judged)
        for reference, output in zip(self._reference, outputs, strict=True):
            if isinstance(reference, Failed):
                continue
            if isinstance(output, Failed):
                raise UsageError(f"it fails on an input that fp32 takes: {output}")
            found = dict(output_tensors(output))
            for path, leaf in reference.items():
                closeness.add(path, leaf, found[path], scores=self.scores and _holds_scores(path, reference))
        return closeness.found()

    # inside

    def _predictor(self, plan: Plan) -> Predictor:
        return Predictor(self.model, plan, batch_size=self._batch_size, device=self._device)

    def _batches(self, cuda: bool) -> list[Option]:
        """How ragged inputs are put together; those of fixed size go in batches of the caller's size."""
        if len(set(self.lengths)) < 2:
            return []
        found = [Option(label=f"{way} batches", choices={"batching": way}) for way in ("padded", "equal")]
        total, usual = sum(self.lengths), 16384 if cuda else 2048
        for size in (usual // 4, usual // 2, usual * 2, usual * 4):
            if min(size, usual) < total:  # else all is one batch either way
                found.append(Option(label=f"batches of {size} tokens", choices={"batch_tokens": size}))
        return found

    def _compiled(self, cuda: bool) -> list[Option]:
        modes = ["regional"] if repeated_blocks(self.model) else []
        modes += ["default", "reduce-overhead", "max-autotune"] if cuda else ["default"]
        either = ("weights", "activations")
        return [Option(label=f"compile {mode}", choices={"compile": mode}, instead_of=either) for mode in modes]

    def _exact(self) -> list[dict[str, Tensor] | Failed]:
        """The outputs of the model in fp32, otherwise unchanged."""
        exact = self._predictor(Plan(precision="fp32"))
        return [one if isinstance(one, Failed) else dict(output_tensors(one)) for one in exact(self._judged)]

    def _scores(self, asked: bool | None) -> tuple[bool, str]:
        usable = [one for one in self._reference if not isinstance(one, Failed)]
        if not usable:
            failed = next(one for one in self._reference if isinstance(one, Failed))
            raise failed.error("no sample input has an output in fp32")
        first = usable[0]
        numbers = {path: leaf for path, leaf in first.items() if leaf.is_floating_point()}
        shapes = [leaf.shape for leaf in numbers.values()]
        guess, why = scores_of(list(numbers), shapes, calling_of(self.model).vocabulary)
        if asked is None:
            return guess, why
        return asked, "the outputs are scores of answers" if asked else "the outputs are numbers, not scores of answers"


class PredictingRunner:
    """Predictor under one plan."""

    def __init__(self, predictor: Predictor, plan: Plan, subject: TunedPrediction) -> None:
        self.predictor, self._plan, self._subject = predictor, plan, subject

    @property
    def notes(self) -> Sequence[str]:
        return tuple(self.predictor.run.notes)

    def first(self) -> str:
        self.run()
        compiled = self.predictor.run.compiled
        if compiled is not None and compiled.gave_up is not None:
            return compiled.gave_up
        wanted = self._plan.batching
        other = [note for note in self.notes if note.startswith("batches are") and wanted is not None]
        return other[0] if other and not other[0].startswith(f"batches are {wanted}") else ""

    def run(self) -> object:
        for _ in self.predictor(self._subject.inputs):
            pass
        return None

    def judge(self) -> Accuracy:
        return self._subject.judge(self.predictor)

    def share(self) -> str:
        predictions = self.predictor(self._subject.inputs)
        predictions.collect()
        figures = predictions.figures
        if figures.share_of_ceiling is None:
            return "share of the ceiling unknown: operations or ceilings are not measured (flatout check --measure)"
        return f"{figures.share_of_ceiling:.0%} of matrix products in {figures.ceiling_dtype}"


def _measured(plain: Predictor, given: list[object]) -> tuple[float, float]:
    """(seconds of one, bytes of its output), from a few of them. UsageError where none can be used."""
    few = _spread(given, FIRST_ITEMS)
    results = plain(few).collect()
    failed = [one for one in results if isinstance(one, Failed)]
    if len(failed) == len(results):
        raise failed[0].error("no sample input can be used")
    start = time.perf_counter()
    plain(few).collect()
    seconds = (time.perf_counter() - start) / len(few)
    sizes = [sum(leaf.nbytes for _, leaf in output_tensors(one)) for one in results if not isinstance(one, Failed)]
    return max(seconds, 1e-9), max(sizes)


def _lengths(plain: Predictor, inputs: list[object]) -> list[int]:
    """Tokens of each; [] where they are of fixed size."""
    calling, found = plain.run.runner.calling, []
    for index, value in enumerate(inputs):
        try:
            length = read_sample(index, value, calling).length
        except UsageError:
            continue
        if length is not None:
            found.append(length)
    return found


def _spread(values: list[object], most: int) -> list[object]:
    """At most `most` of them, evenly spread over the list."""
    if len(values) <= most:
        return values
    return [values[place * len(values) // most] for place in range(most)]


def _holds_scores(path: str, outputs: dict[str, Tensor]) -> bool:
    """Of several outputs those that are called logits."""
    return "logits" in path or not any("logits" in one for one in outputs)
