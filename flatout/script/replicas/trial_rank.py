"""A rank of a run that is only a trial: recorded for the proof, or taking commands.

recorded    some steps of the script, then its end: `Recording` says which. It leaves in the folder what a trial's
            process answers (`flatout.script.numerics`), with a digest of the samples that it was handed; and each rank
            its losses, as parts of the losses of all
commanded   what is timed is what a rank of a real run does: its shares, its exchanges, and the levers of a plan
            (`flatout.tuning.devices.ranks_trial`)
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from flatout.levers.applied import Applied
from flatout.levers.lever import choices_from_json, split_by_switch
from flatout.replaced import replaced
from flatout.script.entry import Target
from flatout.script.numerics import NumericsRecorder, NumericsRequest
from flatout.script.process_end import leave_at_once
from flatout.script.replicas.rank import begin, run_script
from flatout.script.replicas.replica import Replica
from flatout.script.replicas.settings import LOSSES, RECORD, Recording
from flatout.script.trial.commanded_rank import CommandedRank
from flatout.script.trial.session import Session, load_levers
from flatout.script.watch import Watch

if TYPE_CHECKING:
    from torch import Tensor

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
NO_STEPS = 3
"""Exit status where the script has ended and no step was recognized."""


class Recorder:
    """Watches one rank."""

    def __init__(self, folder: Path, replica: Replica, recording: Recording) -> None:
        self._folder, self._replica, self._recording = folder, replica, recording
        self._watch = Watch()
        self._patches = contextlib.ExitStack()
        self._recorder: NumericsRecorder | None = None
        self._losses: list[list[Tensor]] = [[]]
        self._watch.at_boundary.append(self._boundary)
        self._applied = Applied(self._watch.subject)
        levers = load_levers(replica.settings.levers) if replica.settings.choices else ()
        self._choices = choices_from_json(replica.settings.choices, levers)
        replica.at_torch.append(self._watch.install)
        replica.at_torch.append(lambda torch: self._applied.set(split_by_switch(self._choices)[0]))
        if recording.without_dropout:
            replica.at_torch.append(lambda torch: self._patches.enter_context(dropout_left_out(torch)))
        replica.at_loss.append(self._loss)

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

    def finish(self, *, ended: bool) -> NoReturn:
        """Leave what was recorded, and leave when all ranks have come so far. ended: the script has ended by itself."""
        recorder = self._recorder
        if recorder is None or not recorder.steps:
            leave_at_once(self._replica.end(NO_STEPS))
        losses = [[float(one) for one in step] for step in self._losses[: recorder.steps]]
        (self._folder / f"{LOSSES}{self._replica.number}.json").write_text(json.dumps(losses))
        if self._replica.number == 0:
            found = {
                **recorder.finish(),
                "ended": ended,
                "unseeded": list(self._replica.facts().unseeded),
                "order": self._replica.order,
                "autocast": self._watch.saw_autocast or any(one.exactness == "reduced" for one in self._choices),
            }
            (self._folder / RECORD).write_text(json.dumps(found))
        leave_at_once(self._replica.end(0))


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
    def attention(*args: object, **kwargs: object) -> Tensor:  # torch checks them
        kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}
        return original(*args[:4], *([0.0] * bool(args[4:])), *args[5:], **kwargs)

    return attention


def main(arguments: Sequence[str]) -> int:
    """arguments: the folder, then the script and its own."""
    folder, target = Path(arguments[0]), Target.from_command(arguments[1:])
    replica = begin(folder)
    settings = replica.settings
    if settings.recording is not None:
        recorder = Recorder(folder, replica, settings.recording)
        return run_script(replica, target, lambda: recorder.finish(ended=True))
    child = CommandedRank(folder, lambda: replica.number, target)
    session = Session(child, settings.levers, settings.choices, child.read)
    replica.at_torch += session.at_torch
    replica.install()
    return child.run(session, replica.end)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
