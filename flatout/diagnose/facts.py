"""The input of the checks: all that is known of a script, gathered once, so that each check is a pure function."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.diagnose.model_facts import ModelFacts
from flatout.levers.observed import Observed
from flatout.machine.description import Machine
from flatout.profiling.profile import OperatorRow, Profile
from flatout.script.behaviour_seen import Behaviour, SourceLine
from flatout.script.epochs import EpochStarts
from flatout.script.growth import Growth
from flatout.script.process_record import ProcessRecord
from flatout.script.source_facts import SourceFacts

CHANGING_SHAPES = 4
"""Of the inputs in a window of steps."""
_NOTHING_SEEN = Behaviour(steps=0, seconds=0.0)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What only a whole run shows."""

    steps: int
    growth: Growth | None = None
    nearly_out: tuple[int, int, int] | None = None
    """(step, available bytes, total bytes) when hardly any of the host's memory was left."""
    rolled_back: tuple[tuple[str, str], ...] = ()
    """(lever, why it was taken back)."""
    epochs: EpochStarts | None = None
    processes: int = 0
    """How many processes that the script started trained."""
    ranks: tuple[ProcessRecord, ...] = ()
    """Those that trained, where there are several."""
    devices: int | None = None
    """On so many devices Flatout runs a script for one; None: the script itself says on how many."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """None: not known, as after `flatout run`, which does not profile."""

    command: str = ""
    """The script and its arguments, as a shell would read them."""
    planned: bool = False
    """Does the script run with a plan?"""
    observed: Observed | None = None
    profile: Profile | None = None
    behaviour: Behaviour | None = None
    source: SourceFacts | None = None
    run: RunFacts | None = None
    machine: Machine | None = None
    model: ModelFacts | None = None
    """A model that was built but not run, as by `flatout check net.py:make`."""
    cpu_flops_per_second: float | None = None
    """Of fp32 products on the processor, as measured before; also where the script trains on a GPU."""
    contended: bool = False
    """Did others keep the processor busy meanwhile? Then threads wait for cores, anywhere in a step."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs of this machine that torch can use."""

    @property
    def device(self) -> str:
        """'cpu' or 'cuda:0'."""
        known = self.profile or self.behaviour or self.observed
        return known.device if known is not None else "cpu"

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def seen(self) -> Behaviour:
        """The behaviour; one in which nothing was seen where the script was not watched."""
        return self.behaviour if self.behaviour is not None else _NOTHING_SEEN

    @property
    def operators(self) -> tuple[OperatorRow, ...]:
        return self.profile.operators if self.profile is not None else ()

    @property
    def step_seconds(self) -> float | None:
        """The median of steps that nothing slowed down."""
        if self.profile is not None and self.profile.best_step_seconds is not None:
            return self.profile.best_step_seconds
        return self.observed.step_seconds if self.observed is not None else None

    @property
    def whole_step_seconds(self) -> float | None:
        """A step with its share of everything between steps, from the window in which the script was followed."""
        return self.seen.seconds / self.seen.steps if self.seen.steps and self.seen.seconds else None

    def part_seconds(self, part: str) -> float | None:
        """Seconds of a step spent in a part ('data', 'other', ...); None where they were not measured."""
        parts = self.profile.parts if self.profile is not None else None
        if parts is not None and part in (known := parts.to_json()):
            return known[part]
        return self.observed.breakdown_seconds.get(part) if self.observed is not None else None

    def part_share(self, part: str) -> float | None:
        seconds, step = self.part_seconds(part), self.step_seconds
        return seconds / step if seconds is not None and step else None

    def share(self, seconds: float | None) -> float | None:
        """Of a step."""
        return seconds / self.step_seconds if seconds is not None and self.step_seconds else None

    @property
    def tune(self) -> str | None:
        """The command that tries the levers, where no plan is in force."""
        return None if self.planned or not self.command else f"flatout tune {self.command}"

    def text_of(self, file: str, line: int) -> str:
        """Of a line of the script that the profile names; '' where it names it not."""
        rows = self.profile.lines if self.profile is not None else ()
        return next((row.text for row in rows if (row.file, row.line) == (file, line)), "")

    def lines_calling(self, *names: str, in_training_loop: bool = False) -> tuple[SourceLine, ...]:
        """Lines of the script with a call of one of these: 'clip_grad_norm_', 'torch.save'."""
        return () if self.source is None else self.source.lines_calling(*names, in_training_loop=in_training_loop)
