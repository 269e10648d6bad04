"""Time in which a rank's own thread, or its device, waits for collectives: communication that nothing overlaps.

Only in a window, and only in a process that trains with others. Three places are timed:

    collectives          all_reduce, broadcast, barrier...: those that the script calls are waited for at once
    waiting for them     `work.wait()`, and the wait of functional collectives (FSDP2, tensor parallel)
    the end of backward  from the last gradient to the return of the pass: there DDP waits for its buckets, in C++

No collective of ours is added, and none is changed. Where the device is a GPU, marks in its queue are timed instead of
the host, so that a collective in another queue counts only as long as the training waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flatout.levers.subject import Subject
from flatout.script.patches import Patches, around
from flatout.script.spans import Span
from flatout.torch_private.compiler import compile_was_asked_for

if TYPE_CHECKING:
    from torch import Tensor

KIND = "communication"
ALONE = "this process trains in no group of ranks"
COMPILED = "unknown, because compiled code calls collectives where they are not seen"
IN_QUEUES = (
    "unknown, because FSDP and tensor parallelism wait in the queues of the GPU; flatout profile shows its kernels"
)
REPLACED = "unknown, because the script has put functions of its own in the place of torch's collectives"
NOT_WATCHED = "unknown, because no step was watched closely: they begin with step 10"


def ranks_together() -> tuple[int, int] | None:
    """(rank, how many) of this process in torch's default group; None: it is in none, or alone."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return None
    group = distributed.group.WORLD  # not is_initialized(), which is hidden from a script on several devices
    return (int(group.rank()), int(group.size())) if group is not None and group.size() > 1 else None


def not_seen_because(subject: Subject, device: str) -> str:
    """Why the waiting for other ranks cannot be timed now; '' where it can."""
    if ranks_together() is None:
        return ALONE
    if compile_was_asked_for():
        return COMPILED
    return IN_QUEUES if device != "cpu" and _is_sharded(subject) else ""


def _is_sharded(subject: Subject) -> bool:
    """Are there parameters of which each rank has a part, or modules of FSDP?"""
    tensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    for model in subject.modules:
        if wrapper is not None and any(isinstance(one, wrapper) for one in model.modules()):
            return True
        if tensor is not None and any(isinstance(one, tensor) for one in model.parameters()):
            return True
    return False


class CommunicationCalls:
    """Patches between `install` and `uninstall`.

    `enter(kind)` opens a span, or returns None in another thread or outside of windows; `leave(span)` closes it.
    `enter_in_pass` is for autograd's own threads, while the script's thread is inside a backward pass.
    """

    def __init__(
        self,
        enter: Callable[[str], Span | None],
        leave: Callable[[Span], None],
        enter_in_pass: Callable[[str], Span | None],
    ) -> None:
        self._enter, self._leave, self._enter_in_pass = enter, leave, enter_in_pass
        self._patches = Patches()
        self.on = False

    def install(self) -> bool:
        """Also what the script has imported since the last time. False: it has its own functions in their place."""
        from flatout.torch_private.collectives import exchanging_calls

        if len(self._patches) == len(calls := exchanging_calls()):
            self.on = self._patches.redo()
            return self.on
        self._patches.undo()
        self._patches, self.on = Patches(), True
        timed = around(lambda *_, **__: self._enter(KIND), lambda span, _: self._leave(span))
        for owner, name in calls:
            self._patches.replace(owner, name, timed)
        return True

    def uninstall(self) -> None:
        self.on = False
        self._patches.undo()

    def backward_begins(self, roots: Sequence[Tensor]) -> Callable[[], None]:
        """Time the end of a pass from these roots. Returns what to call when it has returned."""
        from flatout.torch_private.collectives import queue_callback
        from flatout.torch_private.dispatch import without_torch_function

        spans: list[Span] = []

        def gradients_are_there() -> None:
            if (span := self._enter_in_pass(KIND)) is not None:
                spans.append(span)

        def began(gradient: Tensor) -> None:
            """With the first gradient: earlier than that, autograd takes no callbacks."""
            queue_callback(gradients_are_there)

        with without_torch_function():  # the script's own modes must not see our operations
            handle = next((one.register_hook(began) for one in roots if getattr(one, "requires_grad", False)), None)

        def ended() -> None:
            if handle is not None:
                handle.remove()
            for span in spans:
                self._leave(span)

        return ended
