"""What every process of ours that runs a user's script beside the user's own does, whatever it looks for.

    child = IsolatedChild(config)                # ends with its parent, answers in JSON lines
    child.isolate([inductor_folder()])           # nothing of the user's is written from here on
    child.on_torch([watch.torch_imported])
    status = child.execute()
    child.finish({"event": "ended", "status": status})

`config`: the settings that the parent wrote: `parent` (its process), `write_fd` (of the pipe for answers), `scratch`,
`isolation`, `allow_network`, `target`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flatout.errors import FlatoutError
from flatout.script.entry import Target, execute
from flatout.script.isolation import Isolation, enter, explain_failure, guard_torch, kernel
from flatout.script.patches import ImportWatch

_leave = os._exit
INTERRUPTED = 128 + signal.SIGINT


class IsolatedChild:
    """One such process, from its first line on."""

    isolation: Isolation

    def __init__(self, config: dict[str, Any], write_fd: int | None = None) -> None:
        kernel.die_with_parent(signal.SIGKILL)
        if os.getppid() != config["parent"]:
            _leave(1)  # the parent was killed while this process was being started
        self._config = config
        self._answers = os.fdopen(config["write_fd"] if write_fd is None else write_fd, "w")
        self.target = Target(**{**config["target"], "arguments": tuple(config["target"]["arguments"])})
        self.error, self.note = "", ""
        """The script's own traceback where it failed, and what of its surroundings here may have made it fail."""

    def write(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def finish(self, answer: dict[str, Any]) -> NoReturn:
        """The last answer; nothing of Python's or the script's own end runs."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.write(answer)
        _leave(0)

    def isolate(self, shared: Sequence[Path]) -> None:
        """Ends the process where that is refused, and at the script's first write where it may not write at all.

        shared: folders into which it may write all the same.
        """
        try:
            self.isolation = enter(
                Path(self._config["scratch"]),
                shared,
                self._config["isolation"],
                lambda description: self.finish({"event": "stopped", "reason": description}),
                allow_network=self._config["allow_network"],
            )
        except FlatoutError as error:
            self.finish({"event": "refused", "reason": str(error)})

    @property
    def torch_hooks(self) -> list[Callable[[Any], object]]:
        """What the isolation itself has to do as soon as torch is imported."""
        return [guard_torch] if self.isolation.mode == "guard" else []

    def on_torch(self, hooks: Sequence[Callable[[Any], object]]) -> None:
        """Call them, and those of the isolation, as soon as the script has imported torch."""
        called = [*self.torch_hooks, *hooks]

        def torch_imported(torch: Any) -> None:
            for hook in called:
                hook(torch)

        if called:
            ImportWatch({"torch": torch_imported}).install()

    def execute(self) -> int:
        """Run the script; its exit status. FlatoutError where it cannot be run at all."""
        sys.excepthook = self._failed
        try:
            return execute(self.target)
        except KeyboardInterrupt:
            return INTERRUPTED

    def _failed(self, kind: Any, error: Any, trace: Any) -> None:
        self.note = explain_failure(error, self.isolation)
        self.error = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.write(self.error)
