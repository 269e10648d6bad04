"""One rank of an unmodified script: its patches, and what they do when the script draws, calls, differentiates, steps.

training_data.py     a loader makes an iterator: does it feed training? then it hands out this rank's shares
training_steps.py    a model is called, differentiated, updated
here                 what stands around these, and what they have in common
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from flatout.errors import MachineError, describe_error
from flatout.script.own_modules import own_imports
from flatout.script.patches import ImportWatch, Patches
from flatout.script.places import Places
from flatout.script.replicas.agreement import Agreement, RanksDiffer, Row
from flatout.script.replicas.settings import STATUS, UNTOUCHED, Facts, Refusals, Refused, Settings
from flatout.script.replicas.streams import RandomStreams
from flatout.script.replicas.training_data import Call, TrainingData
from flatout.script.replicas.training_steps import TrainingSteps
from flatout.script.seeds import TrialSeeds
from flatout.whole_files import written_whole

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from flatout.script.replicas.gradients import Trained

OWN_LAUNCHERS = {
    "accelerate.accelerator": ("Accelerator", "Accelerate"),
    "lightning.pytorch.trainer.trainer": ("Trainer", "Lightning"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "Lightning"),
    "lightning.fabric.fabric": ("Fabric", "Lightning Fabric"),
    "deepspeed.runtime.engine": ("DeepSpeedEngine", "DeepSpeed"),
}
"""Module -> the class whose instances share the work among ranks by themselves, and whose it is."""


class Replica:
    """Installed before the script starts. `count` 1: nothing is shared, and the script runs as it is."""

    def __init__(self, settings: Settings, folder: Path, number: int, count: int) -> None:
        """folder: of the run; all ranks can write there."""
        self.settings, self.folder, self.number, self.count = settings, folder, number, count
        self.agreement = Agreement(number, count)
        self.refusals = Refusals(folder, number)
        self.streams = RandomStreams(number)
        self.at_update: list[Callable[[Optimizer], None]] = []
        """Called before each optimizer's step, when gradients are averaged."""
        self.at_torch: list[Callable[[ModuleType], object]] = []
        """Called once torch has been imported, after this has put its patches on."""
        self.at_loss: list[Callable[[Sequence[Tensor], float], None]] = []
        """Called with the roots of each backward pass, and how much it counts in the mean over the ranks."""
        self._patches = Patches()
        self._places = Places(os.getcwd())
        recording = settings.recording
        self._seeds = TrialSeeds([self._torch_imported], recording.seeds_moved if recording is not None else 0)
        self._stack = contextlib.ExitStack()
        self._main_thread, self._process = threading.get_ident(), os.getpid()
        self._of_script: Trained | None = None
        self._off = self._ended = False
        self.updates = self.backwards = self.batches = 0
        self.order = 0
        """A digest of the indices in all training batches so far, on all ranks."""
        self.data, self.steps = TrainingData(self), TrainingSteps(self)

    # before and after the script

    def install(self) -> None:
        """Seed what the script leaves unseeded alike on all ranks, and wait for it to import torch."""
        watched: dict[str, Callable[[ModuleType], None]] = {
            module: self._refusing(name, whose) for module, (name, whose) in OWN_LAUNCHERS.items()
        }
        ImportWatch(watched).install()
        self._seeds.install()

    def end(self, status: int) -> int:
        """The script has ended with this exit status. Tells the other ranks and the parent; returns the rank's status:
        a script that has caught the exit of a refusal has failed all the same."""
        if self.refusals.refused:
            status = status or STATUS
        if self._ended or os.getpid() != self._process:
            return status
        self._ended = self._off = True
        self.agreement.end(failed=status != 0)
        if self.number == 0:
            with contextlib.suppress(OSError):
                self.facts().write(self.folder)
        self.agreement.close()
        return status

    def tell(self, name: str, text: str) -> None:
        """The parent, in a file of that name; nobody waits for it."""
        with contextlib.suppress(OSError), written_whole(self.folder / name, durable=False) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def facts(self) -> Facts:
        data, largest = self.data, self.data.largest
        return Facts(
            ranks=self.count,
            updates=self.updates,
            batches=self.batches,
            samples=None if largest is None else largest.whole,
            own_samples=None if largest is None else largest.samples,
            uneven=data.uneven,
            batch_norms=self.steps.batch_norms,
            draws_in_model=self.streams.drew,
            realigned=data.realigned,
            unseeded=tuple(self._seeds.unseeded),
            multiplied=data.multiplied,
        )

    def _refusing(self, name: str, whose: str) -> Callable[[ModuleType], None]:
        def imported(module: ModuleType) -> None:
            owner = getattr(module, name, None)
            if isinstance(owner, type):
                self._patches.replace(owner, "__init__", lambda original: self._refused_call(f"{whose}'s {name}"))

        return imported

    def _refused_call(self, what: str) -> Call:
        def refuse(*args: object, **kwargs: object) -> object:
            raise self.refusals.refuse(
                f"the script uses {what}",
                limit="it shares the work among ranks by itself, and would do so twice",
                remedy=f"start it as it is: {UNTOUCHED}",
            )

        return refuse

    def _torch_imported(self, torch: ModuleType) -> None:
        from torch import distributed

        from flatout.levers.grad_attribute import delete_grad, grad_replaced
        from flatout.script.replicas.gradients import Trained

        self._of_script = Trained()
        self.data.install(self._patches)
        self.steps.install(self._patches)
        replace = self._patches.replace
        replace(torch.nn.DataParallel, "__init__", lambda original: self._refused_call("DataParallel"))
        if distributed.is_available():
            replace(distributed, "is_initialized", lambda original: lambda: False)  # the group is none of the script's
            replace(distributed, "init_process_group", lambda original: self._refused_call("torch.distributed"))
        if self.count > 1:
            self._stack.enter_context(
                grad_replaced(self.steps.reads_gradients, self.steps.writes_gradients, delete_grad)
            )
        os.register_at_fork(after_in_child=self._forked)
        for callback in self.at_torch:
            callback(torch)

    @property
    def trained(self) -> Trained:
        """What the script trains."""
        assert self._of_script is not None
        return self._of_script

    def _forked(self) -> None:
        """A loader's worker, or another process of the script: it is no rank."""
        self._off = True

    def here(self) -> bool:
        """Is this the script's own thread, in a rank that has not ended?"""
        return not self._off and threading.get_ident() == self._main_thread

    def line(self) -> str:
        """The line of the script that is running, 'train.py:12'."""
        file, line = self._places.here()
        return f"{Path(file).name}:{line}" if line else "the script"

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Around what is exchanged: ends the rank where the ranks have parted."""
        try:
            with own_imports():
                yield
        except RanksDiffer as differ:
            self._off = True
            if differ.failed:
                raise Refused from None
            raise self.refusals.refuse(differ.what, limit=differ.limit, remedy=differ.remedy) from None
        except MachineError as error:
            self._off = True
            raise self.refusals.refuse(error.what, limit=error.limit, remedy=error.remedy, machine=True) from None

    def row(self, event: int, **more: int) -> Row:
        """What this rank tells the others before it does that."""
        return Row(
            event=event,
            updates=self.updates,
            backwards=self.backwards,
            batches=self.batches,
            order=self.order,
            **more,
        )

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around an exchange of tensors: the other ranks may go meanwhile."""
        try:
            yield
        except RuntimeError as error:
            raise RanksDiffer(
                f"rank {self.number} was left alone while tensors were exchanged: {describe_error(error)}",
                limit="another rank has ended, or hangs",
                remedy="look for its error above",
            ) from None
