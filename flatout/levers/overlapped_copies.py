"""Copies of batches to the GPU that the host does not wait for: it goes on queueing work while they run.

A plain `x.to("cuda")` waits until the GPU has done all that was queued before it. Here the values go first, at once, to
page-locked memory of their own: what the script does to its tensor afterwards, in numpy too, comes too late to matter.
From there they are copied in the order of the stream, and the memory is used again only after that.

What could tell the difference is refused or ends it: another stream, which may not wait for this one (the script's
files speak of streams, or something enters one), and a copy from the GPU that nobody waits for, and which so far was
complete after the next copy to it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from flatout.levers.lever import Lever, Saving, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.replaced import replaced

MOST_WAITING_BYTES = 256 << 20
"""Page-locked memory for copies that have not run yet; more than that is waited for."""
WAITED_SHARE = 0.3
"""What a step may lose besides the copies, as the GPU has nothing queued after each; it was not measured."""

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
            return refuse("the script trains on the CPU")
        if observed.orders_device_work:
            return refuse(f"{observed.orders_device_work}: the script itself orders what waits for what")
        return offer(True, reason="the host waits for each copy to the GPU")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        import torch

        copies = _Copies(lambda why: subject.note_incident(self.name, why))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what was copied from the GPU until now is there: no later copy need wait for it
        with (
            replaced(torch.Tensor, "to", copies.moved),
            replaced(torch.Tensor, "cuda", copies.moved),
            replaced(torch.Tensor, "copy_", copies.copied),
            replaced(torch.cuda, "set_stream", copies.stream_changed),
        ):
            yield


class _Copies:
    """Those that were queued and may not have run yet."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._ended = False
        self._waiting: deque[tuple[Any, int]] = deque()
        """(event behind a copy, its bytes)"""
        self._waiting_bytes = 0

    # what the script calls

    def moved(self, original: Any) -> Any:
        """Of `to` and `cuda`."""
        import torch

        of_cuda = original.__name__ == "cuda"
        compiling = torch.compiler.is_compiling

        def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
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

    def copied(self, original: Any) -> Any:
        def copy_(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_cpu and _asks_not_to_wait(args, kwargs):
                self._end(FROM_THE_GPU)
            return original(tensor, *args, **kwargs)

        return copy_

    def stream_changed(self, original: Any) -> Any:
        """Of `torch.cuda.set_stream`, which `with torch.cuda.stream(...)` calls too."""
        import torch

        def set_stream(stream: Any) -> None:
            if stream is not None and not self._ended and stream != torch.cuda.default_stream(stream.device):
                self._end(IN_ANOTHER_STREAM)
            original(stream)

        return set_stream

    # what becomes of copies

    def _copy(self, tensor: Any, device: Any, queue: Callable[[Any], Any]) -> Any:
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
        """From now on each copy is waited for, and with it all that was queued before; so are those under way."""
        self._ended = True
        while self._waiting:
            self._waiting.popleft()[0].synchronize()
        self._tell(f"{why}: its copies to the GPU are waited for, as written")


def _asks_not_to_wait(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking")) or any(one is True for one in args)


def _target(args: tuple[Any, ...], kwargs: dict[str, Any], *, of_cuda: bool) -> Any:
    """The torch.device, where a call says a GPU and nothing else; None otherwise."""
    import torch

    if len(args) + len(kwargs) > 1 or (kwargs and "device" not in kwargs):
        return None
    told = args[0] if args else kwargs.get("device", "cuda" if of_cuda else None)
    if isinstance(told, bool) or not isinstance(told, str | int | torch.device):
        return None
    try:
        device = torch.device(told)
    except RuntimeError:
        return None  # the mistake is torch's to explain
    return device if device.type == "cuda" else None


def _fits(tensor: Any, device: Any) -> bool:
    """Plain values, on their way in the main stream of a GPU that records nothing."""
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
