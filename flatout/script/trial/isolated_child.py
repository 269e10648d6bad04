"""What every trial's process does: isolate itself, run the script, answer its parent.

    child = IsolatedChild(config, write_fd)      # ends with its parent, answers in JSON lines
    child.isolate()                              # nothing of the user's is written from here on
    child.run(observer)                          # the script, from its first line to its end

`config`: the settings that the parent wrote.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn, Protocol

from flatout.errors import FlatoutError, TrialError
from flatout.script.entry import Target, execute
from flatout.script.isolation import Isolation, enter, explain_failure, guard_torch, kernel
from flatout.script.patches import ImportWatch
from flatout.script.process_end import call_before_exec, exit_now, flush_streams
from flatout.script.trial.messages import TrialConfig

if TYPE_CHECKING:
    from flatout.script.watch import Watch

INTERRUPTED = 128 + signal.SIGINT
MOST_ERROR_CHARACTERS = 8000

Answer = Mapping[str, object]
"""See `messages`."""


def ended_answer(
    status: int | None, error: str, *, steps: int = 0, script_steps: int = 0, note: str = ""
) -> dict[str, object]:
    """The script has ended. status: None: this process does not know; error: its traceback, or ''."""
    told = {"status": status, "error": error[-MOST_ERROR_CHARACTERS:], "note": note}
    return {"event": "ended", **told, "steps": steps, "script_steps": script_steps}


def becomes_another(name: str, command: str) -> dict[str, object]:
    """The script's process is about to become another program, of which nobody here would know a step."""
    error = TrialError(
        f"{name} becomes another program before its first step: {command}",
        limit="a trial follows the process in which the script starts",
        remedy="set what it sets, as environment variables, before Flatout starts, or name the script that it starts",
    )
    return {"event": "refused", "reason": str(error)}


class ObservedProcess(Protocol):
    """The process in which an observer is."""

    target: Target

    def on_torch(self, hooks: Sequence[Callable[[ModuleType], object]]) -> None:
        """Call them once torch has been imported."""

    def guarded(self, callback: Callable[[], None]) -> Callable[[], None]:
        """`callback`, such that an error of ours does not look like the script's."""

    def finish(self, answer: Answer) -> None:
        """All is known that was asked: the process may end here."""


class Observer(Protocol):
    """Observes the script while it runs."""

    watch: Watch

    def install(self) -> None:
        """Called right before the script's first line."""

    def ended(self) -> Answer | None:
        """Called when the script has ended: what was found until then; None: no answer."""


class IsolatedChild:
    """One such process, from its first line on."""

    isolation: Isolation
    torch_hooks: Sequence[Callable[[ModuleType], object]] = (guard_torch,)
    """What the isolation needs to do as soon as torch is imported."""

    def __init__(self, config: TrialConfig, write_fd: int) -> None:
        kernel.die_with_parent(signal.SIGKILL)
        if os.getppid() != config["parent"]:
            exit_now(1)  # the parent was killed while this process was being started
        self._config = config
        self._answers = os.fdopen(write_fd, "w")
        self._pid = os.getpid()
        """The script's process; others end without an answer, such as a loader's workers."""
        self.target = Target.from_command(config["target"])
        self._error, self._note = "", ""
        """The script's own traceback where it failed, and what about the trial may have made it fail."""

    @property
    def answers_descriptor(self) -> int:
        return self._answers.fileno()

    @property
    def writable(self) -> list[Path]:
        """Folders to which trials write for real."""
        return [Path(path) for path in (self._config["scratch"], *self._config["shared"])]

    def own_folder(self) -> Path:
        """A new folder for this process's temporary files, removed with the trial's."""
        return Path(tempfile.mkdtemp(dir=self._config["scratch"]))

    def become(self, write_fd: int) -> None:
        """This process was forked from that of another trial, and answers a parent's end of its own."""
        self._answers.close()
        self._answers, self._pid = os.fdopen(write_fd, "w"), os.getpid()

    def write(self, answer: Answer) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def finish(self, answer: Answer) -> NoReturn:
        """Write the last answer and exit at once, without any exit handlers."""
        flush_streams()  # whoever gets the answer may read the log
        self.write(answer)
        exit_now(0)

    def isolate(self) -> None:
        """Ends the process where isolation is refused, and at the script's first write where it may not write at
        all."""
        try:
            self.isolation = enter(
                Path(self._config["scratch"]),
                [Path(path) for path in self._config["shared"]],
                self._config["isolation"],
                lambda description: self.finish({"event": "stopped", "reason": description}),
                allow_network=self._config["allow_network"],
            )
        except FlatoutError as error:
            self.finish({"event": "refused", "reason": str(error)})
        except OSError as error:
            self.finish({"event": "refused", "reason": f"a trial cannot be kept from your files: {error}"})
        self.write({"event": "isolated", **asdict(self.isolation)})

    def on_torch(self, hooks: Sequence[Callable[[ModuleType], object]]) -> None:
        """Call them, and those of the isolation, as soon as the script has imported torch."""
        called = [*self.torch_hooks, *hooks]

        def torch_imported(torch: ModuleType) -> None:
            for hook in called:
                hook(torch)

        ImportWatch({"torch": torch_imported}).install()

    def guarded(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Wrap `callback` so that an error of ours does not look like the script's."""

        def call() -> None:
            try:
                callback()
            except Exception as error:
                self._fault(error)

        return call

    def run(self, observer: Observer) -> NoReturn:
        """Run the script to its end, also where it calls os._exit or os.execv; never returns."""
        self._pid = os.getpid()

        def left_at_once(status: int) -> NoReturn:
            if os.getpid() != self._pid:
                exit_now(status)
            self._ended(observer, status & 255)

        def becomes(command: str) -> None:
            if os.getpid() != self._pid:
                return
            if not observer.watch.steps:
                self.finish(becomes_another(self.target.name, command))
            self._note = f"it became another program: {command}"
            self._ended(observer, 0)

        observer.install()
        os._exit = left_at_once
        call_before_exec(becomes)
        try:
            status = execute(self.target, self._failed)
        except KeyboardInterrupt:
            status = INTERRUPTED
        except FlatoutError as error:
            self.finish({"event": "refused", "reason": str(error)})
        self._ended(observer, status)

    def _ended(self, observer: Observer, status: int) -> NoReturn:
        if os.getpid() != self._pid:  # a process that the script has forked ends as under Python, and answers nobody
            raise SystemExit(status)
        try:
            found = observer.ended()
        except Exception as error:
            self._fault(error)
        if found is not None:
            self.write(found)
        watch = observer.watch
        steps, script_steps = watch.steps, watch.finder.steps
        self.finish(ended_answer(status, self._error, steps=steps, script_steps=script_steps, note=self._note))

    def _failed(self, error: BaseException) -> None:
        self._error = "".join(traceback.format_exception(error))
        self._note = explain_failure(error, self.isolation)

    def _fault(self, error: Exception) -> NoReturn:
        traceback.print_exc()
        self.finish({"event": "fault", "reason": f"{type(error).__name__}: {error}"})
