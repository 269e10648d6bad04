"""Values of many steps, read from the device together, some steps later.

Reading a value waits for everything queued on the device. If the values are kept for some steps and copied to the host
in the background, they have arrived when they are read, and no step waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STEPS_PER_READING = 32

Place: TypeAlias = "float | Tensor | tuple[int, int]"
"""A value itself, a tensor on the host, or (group, place in it) among the copied tensors."""

K = TypeVar("K")


class Readings(Generic[K]):
    """Calls `take(key, values)` for everything added, in order: every 32 additions for the values that have arrived,
    and for all of them when `read` is called."""

    def __init__(self, take: Callable[[K, list[float]], None]) -> None:
        self._take = take
        self._held: list[tuple[K, Sequence[Tensor | float]]] = []
        self._asked: deque[tuple[list[tuple[K, list[Place]]], list[HostCopy]]] = deque()

    def add(self, key: K, values: Sequence[Tensor | float]) -> None:
        """Scalars: numbers, or tensors that nothing changes later."""
        self._held.append((key, values))
        if len(self._held) >= STEPS_PER_READING:
            self._ask()
            self._hand_over(wait=False)

    def read(self) -> None:
        """Take all of them. Waits for the device."""
        if self._held:
            self._ask()
        self._hand_over(wait=True)

    def _ask(self) -> None:
        import torch

        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        rows: list[tuple[K, list[Place]]] = []
        for key, values in self._held:
            places: list[Place] = []
            for value in values:
                if not isinstance(value, torch.Tensor):
                    places.append(float(value))
                elif value.is_cpu:
                    places.append(value)
                else:
                    kind = value.device, value.dtype
                    group = groups.setdefault(kind, [])
                    places.append((list(groups).index(kind), len(group)))
                    group.append(value.detach().reshape(()))
            rows.append((key, places))
        self._held = []
        self._asked.append((rows, [HostCopy(torch.stack(group)) for group in groups.values()]))

    def _hand_over(self, *, wait: bool) -> None:
        while self._asked:
            rows, copies = self._asked[0]
            if not wait and not all(copy.arrived() for copy in copies):
                return
            self._asked.popleft()
            found = [copy.values() for copy in copies]
            for key, places in rows:
                self._take(key, [_read(one, found) for one in places])


def _read(place: Place, found: Sequence[Sequence[float]]) -> float:
    if isinstance(place, tuple):
        return found[place[0]][place[1]]
    return place if isinstance(place, float) else float(place.item())


class HostCopy:
    """A tensor on its way to the host: `values` waits for it, nothing else does."""

    def __init__(self, values: Tensor) -> None:
        import torch

        self._host = values
        event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(values.device))  # the current device may be another one
        self._event = event

    def arrived(self) -> bool:
        return self._event is None or bool(self._event.query())

    def values(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return [float(value) for value in self._host.flatten().tolist()]
