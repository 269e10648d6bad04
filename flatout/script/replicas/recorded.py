"""A rank of a run that is only recorded, for the proof: some steps of the script, then its end. `Recording` says which.

It leaves in the folder what a trial's process answers (`flatout.script.numerics`), with a digest of the samples that it
was handed; and each rank its losses, as parts of the losses of all.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from flatout.errors import UsageError
from flatout.levers.applied import Applied
from flatout.levers.lever import choices_from_json, split_by_switch
from flatout.replaced import replaced
from flatout.script.entry import Target
from flatout.script.numerics import NumericsRecorder, NumericsRequest
from flatout.script.replicas.rank import Rank, begin, run_script
from flatout.script.replicas.settings import LOSSES, RECORD, Recording
from flatout.script.trial.session import load_levers
from flatout.script.watch import Watch

if TYPE_CHECKING:
    from torch import Tensor

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
NO_STEPS = 3
"""Exit status where the script has ended and no step was recognized."""


class Recorder:
    """Watches one rank."""

    def __init__(self, folder: Path, rank: Rank, recording: Recording) -> None:
        self._folder, self._rank, self._recording = folder, rank, recording
        self._watch = Watch()
        self._patches = contextlib.ExitStack()
        self._recorder: NumericsRecorder | None = None
        self._losses: list[list[Tensor]] = [[]]
        self._watch.at_boundary.append(self._boundary)
        self._applied = Applied(self._watch.subject)
        levers = load_levers(rank.settings.levers) if rank.settings.choices else ()
        self._choices = choices_from_json(rank.settings.choices, levers)
        rank.replica.at_torch.append(self._watch.install)
        rank.replica.at_torch.append(lambda torch: self._applied.set(split_by_switch(self._choices)[0]))
        if recording.without_dropout:
            rank.replica.at_torch.append(self._leave_out_dropout)
        rank.replica.at_loss.append(self._loss)

    def _loss(self, roots: Sequence[Tensor], weight: float) -> None:
        if self._recorder is not None:
            self._losses[-1] += [root.detach().float().mean() * weight for root in roots]

    def _boundary(self) -> None:
        if self._watch.finder.kind is None:
            return
        if self._recorder is None:
            if self._watch.may_be_inside_a_step():
                return
            own = self._recording
            self._applied.set(self._choices)
            self._recorder = NumericsRecorder(
                self._watch,
                NumericsRequest(
                    steps=own.steps,
                    role=own.role,
                    folder=own.reference,
                    checks=own.checks,
                    nudge="rounding" if own.nudge_ulps else "none",
                    nudge_ulps=own.nudge_ulps or 1,
                    nudge_seed=max(0, own.nudge_ulps - 1),
                ),
            )
            return
        self._recorder.step_ended()
        self._losses.append([])
        if self._recorder.steps >= self._recording.steps:
            self.finish(ended=False)

    def _leave_out_dropout(self, torch: ModuleType) -> None:
        self._patches.enter_context(dropout_left_out(torch))

    def finish(self, *, ended: bool) -> NoReturn:
        """Leave what was recorded, and leave. ended: the script has ended by itself."""
        recorder = self._recorder
        if recorder is None or not recorder.steps:
            self._leave(NO_STEPS)
        losses = [[float(one) for one in step] for step in self._losses[: recorder.steps]]
        (self._folder / f"{LOSSES}{self._rank.number}.json").write_text(json.dumps(losses))
        if self._rank.number == 0:
            replica = self._rank.replica
            found = {
                **recorder.finish(),
                "ended": ended,
                "unseeded": list(replica.facts().unseeded),
                "order": replica.order,
                "autocast": self._watch.saw_autocast or any(one.exactness == "reduced" for one in self._choices),
            }
            (self._folder / RECORD).write_text(json.dumps(found))
        self._leave(0)

    def _leave(self, status: int) -> NoReturn:
        """At once, with no exit handler of the script's; when all ranks have come so far."""
        status = self._rank.replica.end(status)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


@contextlib.contextmanager
def dropout_left_out(torch: ModuleType) -> Iterator[None]:
    """Within, torch's functions drop nothing, as in evaluation."""
    functional = torch.nn.functional
    with contextlib.ExitStack() as patches:
        for name in DROPOUTS:
            patches.enter_context(replaced(functional, name, _as_in_evaluation))
        patches.enter_context(replaced(functional, "scaled_dot_product_attention", _without_mask))
        yield


def _as_in_evaluation(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return original(input, p, training=False, inplace=inplace)

    return dropout


def _without_mask(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attention(*args: Any, **kwargs: Any) -> Tensor:  # torch checks them
        return original(*args[:4], *([0.0] * bool(args[4:])), *args[5:], **{**kwargs, **_none_in(kwargs)})

    return attention


def _none_in(kwargs: dict[str, object]) -> dict[str, object]:
    return {"dropout_p": 0.0} if "dropout_p" in kwargs else {}


def main(arguments: Sequence[str]) -> int:
    """arguments: the folder, then the script and its own."""
    folder, target = Path(arguments[0]), Target.from_command(arguments[1:])
    rank = begin(folder)
    if (recording := rank.settings.recording) is None:
        raise UsageError("nothing is to be recorded", limit="the settings of such a run say what is")
    recorder = Recorder(folder, rank, recording)
    return run_script(rank, target, lambda: recorder.finish(ended=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
