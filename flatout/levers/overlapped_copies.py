"""Copy batches to the GPU without making the host wait: it continues to queue work while they are copied.

From page-locked memory values are copied in stream order, and that memory is reused only when the copy is done.

Scripts that could see a difference are refused, or end it: those that use another stream, which may not wait for this
one (their files mention streams, or something enters one), and those that copy from the GPU without waiting, where so
far the next copy to the GPU made them wait.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.replaced import replaced

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Copy = Callable[..., "Tensor"]
"""One of torch's methods that copy a tensor."""

MOST_WAITING_BYTES = 256 << 20
"""Page-locked memory for copies that have not run yet; beyond that the host waits."""
WAITED_SHARE = 0.3
"""What a step may lose besides the copies, as the GPU has nothing queued after each; an estimate, not measured."""

FROM_THE_GPU = "the script copies from the GPU without waiting"
IN_ANOTHER_STREAM = "something works in a stream of its own"


class OverlappedCopies(Lever):
    """Let the host go on while a batch is copied to the GPU.

    For scripts that use a plain `.to("cuda")` or `.cuda()`, which waits for everything queued before it. The values
    first go to page-locked memory of their own, so the script may change its tensor afterwards. Not for scripts
    that use CUDA streams or `non_blocking` themselves.
    """

    name = "overlapped copies"
    plan_field = "non_blocking"

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        share = observed.share("transfer")
        if share is None:
            return Saving(expected=0.02, least=-0.05, most=0.5)
        why = f"copies take {share:.1%} of a step"
        return Saving(expected=0.5 * share, least=-0.05, most=min(0.9, share + WAITED_SHARE), why=why)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.device.startswith("cuda"):
            return refuse("the model is on the CPU")
        if observed.orders_device_work:
            return refuse(f"{observed.orders_device_work}: the script itself orders what waits for what")
        return offer(True, reason="the host waits for each copy to the GPU")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        import torch

        copies = _Copies(subject.reporter(self.name))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # copies from the GPU so far are complete: no later copy has to wait for them
        with (
            replaced(torch.Tensor, "to", copies.moved),
            replaced(torch.Tensor, "cuda", copies.moved),
            replaced(torch.Tensor, "copy_", copies.copied),
            replaced(torch.cuda, "set_stream", copies.stream_changed),
        ):
            yield


class _Copies:
    """Copies that were queued and may not have run yet."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._ended = False
        self._waiting: deque[tuple[torch.cuda.Event, int]] = deque()
        """(event recorded after a copy, its bytes)"""
        self._waiting_bytes = 0

    # what the script calls

    def moved(self, original: Copy) -> Copy:
        """Replaces `to` and `cuda`."""
        import torch

        of_cuda = original.__name__ == "cuda"
        compiling = torch.compiler.is_compiling

        def move(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
            if self._ended or compiling():
                return original(tensor, *args, **kwargs)
            if not tensor.is_cpu:
                if _asks_not_to_wait(args, kwargs):
                    self._end(FROM_THE_GPU)
                return original(tensor, *args, **kwargs)
            device = _target(args, kwargs, of_cuda=of_cuda)
            if device is None or not _fits(tensor, device):
                return original(tensor, *args, **kwargs)
            return self._copy(tensor, device, lambda values: original(values, device, non_blocking=True))

        return move

    def copied(self, original: Copy) -> Copy:
        def copy_(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
            if tensor.is_cpu and _asks_not_to_wait(args, kwargs):
                self._end(FROM_THE_GPU)
            return original(tensor, *args, **kwargs)

        return copy_

    def stream_changed(
        self, original: Callable[[torch.cuda.Stream | None], None]
    ) -> Callable[[torch.cuda.Stream | None], None]:
        """Replaces `torch.cuda.set_stream`, which `with torch.cuda.stream(...)` calls too."""
        import torch

        def set_stream(stream: torch.cuda.Stream | None) -> None:
            if stream is not None and not self._ended and stream != torch.cuda.default_stream(stream.device):
                self._end(IN_ANOTHER_STREAM)
            original(stream)

        return set_stream

    # what becomes of copies

    def _copy(self, tensor: Tensor, device: torch.device, queue: Callable[[Tensor], Tensor]) -> Tensor:
        import torch

        with torch.no_grad():
            values = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        while self._waiting and self._waiting_bytes + values.nbytes > MOST_WAITING_BYTES:
            event, size = self._waiting.popleft()
            event.synchronize()
            self._waiting_bytes -= size
        copy = queue(values)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        self._waiting.append((event, values.nbytes))
        self._waiting_bytes += values.nbytes
        return copy

    def _end(self, why: str) -> None:
        """From now on the host waits for each copy, as without the lever; so it does for those that are queued."""
        self._ended = True
        while self._waiting:
            self._waiting.popleft()[0].synchronize()
        self._report(f"{why}: its copies to the GPU are waited for, as written")


def _asks_not_to_wait(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    return bool(kwargs.get("non_blocking")) or any(one is True for one in args)


def _target(args: tuple[object, ...], kwargs: dict[str, object], *, of_cuda: bool) -> torch.device | None:
    """The GPU that a call names, if it names nothing else; None otherwise."""
    import torch

    if len(args) + len(kwargs) > 1 or (kwargs and "device" not in kwargs):
        return None
    told = args[0] if args else kwargs.get("device", "cuda" if of_cuda else None)
    if isinstance(told, bool) or not isinstance(told, str | int | torch.device):
        return None
    try:
        device = torch.device(told)
    except RuntimeError:
        return None  # torch explains the mistake
    return device if device.type == "cuda" else None


def _fits(tensor: Tensor, device: torch.device) -> bool:
    """A plain tensor, copied in the main stream of a GPU that captures no graph."""
    import torch

    if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.layout is not torch.strided:
        return False
    whole = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    if not whole or not 0 < tensor.nbytes <= MOST_WAITING_BYTES or tensor.is_conj() or tensor.is_neg():
        return False
    cuda = torch.cuda
    if not cuda.is_initialized() or cuda.is_current_stream_capturing() or (device.index or 0) >= cuda.device_count():
        return False
    return bool(cuda.current_stream(device) == cuda.default_stream(device))
