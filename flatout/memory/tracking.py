"""Follow every tensor's storage from birth to death, on real or on fake tensors, by torch's dispatcher.

    with Tracker() as tracker:
        tracker.hold(model.parameters(), "weights")
        tracker.model = model                     # names modules
        ...                                       # steps
    tracker.timeline().peak().size_bytes

Where a forward ends and a backward begins is seen from the autograd engine, where an optimizer steps from its hooks.

A storage is counted once, at its size in bytes, from the operation that first returned it until nothing refers to it.
Memory that a kernel allocates and frees within one operation is not seen here; `workspace_of` may say how much that
is, and it is counted as allocated and freed during the operation (see `kernel_workspaces`).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from flatout.memory.timeline import Allocation, Category, Phase, Timeline
from flatout.memory.workspace import Operation, WorkspaceOf
from flatout.replaced import replaced
from flatout.torch_private.dispatch import (
    TorchDispatchMode,
    current_graph_task,
    current_node,
    disable_current_modes,
    is_traceable_wrapper_subclass,
    next_node_number,
    node_number,
    tree_leaves,
)
from flatout.torch_private.tensors import is_view, storage_identity, stored_parts

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Lines of torch and of Flatout are not the user's."""
WITHOUT_STORAGE = (RuntimeError, NotImplementedError, ValueError)
"""Raised where there is no storage to be seen: of sparse tensors, oneDNN's own layout, lazy parameters (ValueError)."""


class HasParameters(Protocol):
    """A module, or several that train together."""

    def parameters(self) -> Iterator[Tensor]: ...


class _Delayed(NamedTuple):
    first: int
    """The storage of the first term."""
    sum: Tensor
    operation: str
    event: int
    """How many births and deaths there were when it was made."""
    held_bytes: int
    """What was held then."""


class Tracker:
    """Records while its context is open. The caller sets `step` where it knows that a step begins.

    attributed: also record phase, module and line of each allocation, by hooks and stacks; False: only count.
    limit_bytes: an operation after which more is held raises torch.OutOfMemoryError. prefer: the folder whose lines
    are named, where one of them led to an allocation; None: the innermost line that is not torch's. workspace_of: what
    kernels hold besides their results; None: nothing.
    """

    def __init__(
        self,
        *,
        attributed: bool = True,
        limit_bytes: int | None = None,
        prefer: str | None = None,
        workspace_of: WorkspaceOf | None = None,
        guarded: bool = False,
    ) -> None:
        self.fault: str | None = None
        """guarded: why tracking stopped; an error of ours, which must not reach the script."""
        self._guarded = guarded
        self.step = 0
        self.in_step = True
        """False: what is allocated comes before the first step, as a rank's parts of the model do."""
        self.model: HasParameters | None = None
        self._workspace_of = workspace_of
        self._attributed, self._limit_bytes, self._prefer = attributed, limit_bytes, prefer
        self._allocations: list[Allocation] = []
        self._events: list[tuple[int, bool]] = []
        self._alive: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}
        """Storage -> (allocation's index, bytes that the storage shows, the storage)."""
        self.held_bytes = self.peak_bytes = 0
        self._delayed: _Delayed | None = None
        """A sum that the autograd engine would make in place."""
        self._node = (-1, 0)
        """The autograd node that runs, by its number, and how many allocations there were when it began."""
        self._kept: set[tuple[str, bool]] = set()
        """Workspaces that stay: their name, and whether the thread that runs backward passes took them."""
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        self._in_optimizer = 0
        self._phase: Phase = "forward"
        self._origins: list[tuple[int, str, str]] = []
        """(sequence number of the newest autograd node, module, line) where either changed, in forward order."""
        self._newest_number = -1
        self._streams = [torch.cpu.current_stream()]
        """Of the CPU, where they are only switched; the first is the default one."""
        self._stack = contextlib.ExitStack()
        self._finished = False

    def __enter__(self) -> Tracker:
        enter = self._stack.enter_context
        self._stack.callback(self._stop)
        if self._attributed:
            self._add_hooks()
        enter(replaced(torch.UntypedStorage, "resize_", self._resizing))
        enter(_Mode(self))
        return self

    def _add_hooks(self) -> None:
        for handle in (
            optimizers.register_optimizer_step_pre_hook(self._optimizer_starts),
            optimizers.register_optimizer_step_post_hook(self._optimizer_ends),
            torch.nn.modules.module.register_module_forward_pre_hook(self._module_starts),
            torch.nn.modules.module.register_module_forward_hook(self._module_ends, always_call=True),
        ):
            self._stack.callback(handle.remove)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # what was recorded

    def reset_peak(self) -> None:
        self.peak_bytes = self.held_bytes

    def hold(self, tensors: Iterable[object], category: Category) -> None:
        """Count tensors that were there before, and say what they are; those already counted are only named."""
        tensors = list(tensors)
        for tensor in tensors:
            self._see(tensor, "")
        self.name(tensors, category)

    def name(self, tensors: Iterable[object], category: Category) -> None:
        """Say what tensors are that were counted before; others are left out."""
        for tensor in tensors:
            for inner in plain_tensors(tensor) if isinstance(tensor, Tensor) else ():
                entry = self._alive.get(identity(inner))
                if entry is not None:
                    self._allocations[entry[0]].category = category

    def _name_activations(self) -> None:
        """A forward has ended: what it made and is still alive is kept for the backward pass."""
        for index, *_ in self._alive.values():
            one = self._allocations[index]
            if one.phase == "forward" and one.step == self.step and one.category == "temporaries":
                one.category = "activations"

    def _name_gradients(self) -> None:
        """A backward has ended."""
        if self.model is not None:
            self.name((parameter.grad for parameter in self.model.parameters()), "gradients")

    def _enter_phase(self, phase: Phase) -> None:
        if phase != self._phase:
            if phase == "backward":
                self._name_activations()
            if self._phase == "backward":
                self._name_gradients()
            self._phase = phase

    def timeline(self) -> Timeline:
        """Everything so far. Storages still alive have no end."""
        self._count_delayed()
        if self._phase == "backward":
            self._name_gradients()
        return Timeline(list(self._allocations), list(self._events))

    def alive_by_storage(self) -> dict[int, Allocation]:
        """What is alive, by the identity of its storage (`identity` of any tensor on it)."""
        return {key: self._allocations[index] for key, (index, *_) in self._alive.items()}

    @property
    def events(self) -> int:
        """How many births and deaths there were."""
        return len(self._events)

    # called by the dispatch mode

    def _see(self, tensor: object, operation: str, size_bytes: int = 0) -> None:
        """Count a tensor's storage if it is new. size_bytes: if it holds more than it shows."""
        for inner in plain_tensors(tensor) if isinstance(tensor, Tensor) else ():
            self._see_plain(inner, operation, size_bytes)

    def see_results(
        self, operation: Operation, args: Sequence[object], kwargs: Mapping[str, object], out: object
    ) -> None:
        """Count what an operation returned, and for a moment what its kernel held besides that."""
        name = operation.__name__
        results = [out] if isinstance(out, Tensor) else tree_leaves(out) if out is not None else []
        workspace = self._workspace_of(operation, args, kwargs, out) if self._workspace_of is not None else None
        in_place = name == "scatter.src" and self._scatters_in_place(args, out)
        if workspace is None:
            if not in_place and not self._is_in_place_unfollowed(name, args, out):
                for one in results:
                    self._see(one, name)
            return
        device = _device_of(results, args)
        for kept, size_bytes in workspace.kept_bytes.items():
            key = kept, self._phase == "backward"
            if key not in self._kept:
                self._kept.add(key)
                self._allocations[self._born(kept, size_bytes, (), "", device)].category = "workspaces"
        for number, one in enumerate(() if in_place else results):
            self._see(one, name, workspace.returned_bytes.get(number, 0))
        if workspace.inside_bytes > 0:
            self._dies(self._born(name, workspace.inside_bytes, (), "", device))

    def _is_in_place_unfollowed(self, name: str, args: Sequence[object], out: object) -> bool:
        """Is this the engine summing up gradients of one tensor? It adds in place, but not under a dispatch mode.

        Whether it would depends on who else holds the first term. If that has ended by the time that the next operation
        begins, the sum has its memory; otherwise the sum is counted, as from now on.
        """
        if name != "add.Tensor" or self._phase != "backward" or torch.is_grad_enabled():
            return False
        first = args[0] if len(args) == 2 else None
        if not isinstance(first, Tensor) or not isinstance(out, Tensor) or not _is_dense(first):
            return False
        if is_view(first):  # what it is a view of holds the memory, too
            return False
        key, known = identity(first), self._alive.get(identity(first))
        if known is None or known[0] >= self._node[1] or known[1] != out.untyped_storage().nbytes():
            return False  # a node's own formula sums up what it made itself; the engine, what another node made before
        if identity(out) in self._alive:
            return False
        self._delayed = _Delayed(key, out, name, len(self._events), self.held_bytes)
        return True

    def _scatters_in_place(self, args: Sequence[object], out: object) -> bool:
        """The gradient of sort, topk and their like is scattered into zeros: in place, but not under a dispatch mode.

        So the result takes the place of the zeros.
        """
        zeros = args[0]
        if not isinstance(zeros, Tensor) or not isinstance(out, Tensor) or self._phase != "backward":
            return False
        known = self._alive.get(identity(zeros))
        if known is None or known[0] < self._node[1]:
            return False  # not made by the formula of this node
        del self._alive[identity(zeros)]
        index, storage, key = known[0], out.untyped_storage(), identity(out)
        self._alive[key] = index, storage.nbytes(), weakref.ref(storage, lambda _: self._end(key, index))
        return True

    def _count_delayed(self) -> None:
        """As of the event at which it was made: an allocator may give the memory of what ended since to others."""
        delayed, self._delayed = self._delayed, None
        if delayed is None:
            return
        events = len(self._events)
        self._see(delayed.sum, delayed.operation)
        if len(self._events) == events or events == delayed.event:
            return
        for index, is_birth in self._events[delayed.event : events]:
            later = self._allocations[index]
            if is_birth:
                later.born += 1
            elif later.died is not None:
                later.died += 1
        self._events.insert(delayed.event, self._events.pop())
        one = self._allocations[-1]
        one.born = delayed.event
        self.peak_bytes = max(self.peak_bytes, delayed.held_bytes + one.size_bytes)

    def _see_plain(self, tensor: Tensor, operation: str, size_bytes: int) -> None:
        try:
            storage = tensor.untyped_storage()
        except WITHOUT_STORAGE:
            return
        key, shown = storage_identity(storage), storage.nbytes()
        known = self._alive.get(key)
        if known is not None:
            if known[1] == shown:
                return
            self._end(key)  # resized in place: another allocation
        dtype = str(tensor.dtype).removeprefix("torch.")
        index = self._born(operation, max(shown, size_bytes), tuple(tensor.shape), dtype, tensor.device.type)
        self._alive[key] = index, shown, weakref.ref(storage, lambda _: self._end(key, index))
        if self._limit_bytes is not None and self.held_bytes > self._limit_bytes:
            raise torch.OutOfMemoryError(
                f"{self.held_bytes} bytes of tensors are held, and the limit is {self._limit_bytes}"
            )

    def _resizing(self, resize: Callable[[torch.UntypedStorage, int], None]) -> Callable[..., None]:
        """Storages that are emptied and filled again without an operation: FSDP's gathered parameters."""

        def resized(storage: torch.UntypedStorage, size_bytes: int) -> None:
            resize(storage, size_bytes)
            key = storage_identity(storage)
            if key not in self._alive or self._finished or self._alive[key][1] == storage.nbytes():
                return
            before = self._allocations[self._alive[key][0]]
            self._end(key)
            index = self._born("resize_", storage.nbytes(), before.shape, before.dtype, before.device)
            self._alive[key] = index, storage.nbytes(), weakref.ref(storage, lambda _: self._end(key, index))

        return resized

    def _born(self, operation: str, size_bytes: int, shape: tuple[int, ...], dtype: str, device: str) -> int:
        phase, module, line = self._origin(operation)
        index = len(self._allocations)
        self._allocations.append(
            Allocation(
                size_bytes=size_bytes,
                born=len(self._events),
                phase=phase,
                step=self.step,
                operation=operation,
                module=module,
                line=line,
                shape=shape,
                dtype=dtype,
                device=device,
                stream=self._stream(device),
            )
        )
        self._events.append((index, True))
        self.held_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return index

    def _stream(self, device: str) -> int:
        if device == "cuda":
            return torch.cuda.current_stream().stream_id if torch.cuda.is_initialized() else 0
        current = torch.cpu.current_stream()  # FSDP switches these too; they have no numbers
        number = next((number for number, one in enumerate(self._streams) if one is current), len(self._streams))
        if number == len(self._streams):
            self._streams.append(current)
        return number

    def _dies(self, index: int) -> None:
        one = self._allocations[index]
        one.died = len(self._events)
        self._events.append((index, False))
        self.held_bytes -= one.size_bytes

    def _end(self, key: int, index: int | None = None) -> None:
        entry = self._alive.get(key)
        if entry is None or self._finished or (index is not None and entry[0] != index):
            return
        del self._alive[key]
        if self._delayed is None or self._delayed.first != key:
            self._dies(entry[0])
            return
        storage, number = self._delayed.sum.untyped_storage(), entry[0]
        its_key, self._delayed = storage_identity(storage), None
        self._alive[its_key] = number, storage.nbytes(), weakref.ref(storage, lambda _: self._end(its_key, number))

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around our own work during an operation of the script."""
        try:
            yield
        except Exception as error:
            if not self._guarded:
                raise
            self.fault = f"{type(error).__name__}: {error}"
            self._finished = True

    def _stop(self) -> None:
        self._finished = True  # what is freed from now on outlived the tracking
        self._delayed = None

    # where things come from

    def _origin(self, operation: str) -> tuple[Phase, str, str]:
        if not operation or not self.in_step:
            return "before", "", ""
        if self._phase == "backward":
            return ("backward", *self._forward_origin(current_node()))
        return self._phase, self._module(), self._users_line()

    def operation_starts(self) -> None:
        """Note the phase, and in a forward which autograd nodes come from where."""
        self._count_delayed()
        if current_graph_task() != -1:
            self._enter_phase("backward")
            node = current_node()
            number = node_number(node) if node is not None else -1
            if number != self._node[0]:
                self._node = number, len(self._allocations)
            return
        self._enter_phase("optimizer" if self._in_optimizer and not self._modules else "forward")  # else in a closure
        if not torch.is_grad_enabled():
            return
        number = next_node_number()
        if number == self._newest_number:
            return  # this operation made no node: the newest is another line's
        self._newest_number = number
        origin = self._module(), self._users_line()
        if not self._origins or self._origins[-1][1:] != origin:
            self._origins.append((number - 1, *origin))

    def _forward_origin(self, node: object) -> tuple[str, str]:
        """Module and line of the forward operation that this backward node belongs to."""
        if node is None or not self._origins:
            return "", ""
        at = bisect_right(self._origins, node_number(node), key=lambda entry: entry[0]) - 1
        return self._origins[at][1:] if at >= 0 else ("", "")

    def _module(self) -> str:
        return self._modules[-1] if self._modules else ""

    def _users_line(self) -> str:
        if not self._attributed:
            return ""
        frame: FrameType | None = sys._getframe(2)
        first = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith(_OURS) and not file.startswith("<"):
                if self._prefer is None or (file.startswith(self._prefer) and "-packages/" not in file):
                    return f"{file}:{frame.f_lineno}"
                first = first or f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        return first

    def _module_starts(self, module: nn.Module, args: object) -> None:
        if not self._modules:
            self._names = {id(one): name for name, one in module.named_modules()}
        self._modules.append(self._names.get(id(module), type(module).__name__))

    def _module_ends(self, module: nn.Module, args: object, output: object) -> None:
        if self._modules:
            self._modules.pop()

    def _optimizer_starts(self, optimizer: optimizers.Optimizer, args: object, kwargs: object) -> None:
        self._in_optimizer += 1

    def _optimizer_ends(self, optimizer: optimizers.Optimizer, args: object, kwargs: object) -> None:
        self._in_optimizer = max(0, self._in_optimizer - 1)
        self._name_gradients()
        self.name((value for state in optimizer.state.values() for value in tree_leaves(state)), "optimizer")


class _Mode(TorchDispatchMode):
    """Passes to the tracker what each operation returned."""

    def __init__(self, tracker: Tracker) -> None:
        TorchDispatchMode.__init__(self)
        self._tracker = tracker

    def __torch_dispatch__(
        self,
        func: Operation,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        with self._tracker.guard():
            self._tracker.operation_starts()
        out = func(*args, **(kwargs or {}))
        with self._tracker.guard():
            self._tracker.see_results(func, args, kwargs or {}, out)
        return out


def unseen() -> contextlib.AbstractContextManager[object]:
    """Around code that no tracker, and no other mode of torch's dispatcher, can follow: compiled kernels."""
    return disable_current_modes()


def _device_of(*values: object) -> str:
    return next((one.device.type for one in tree_leaves(values) if isinstance(one, Tensor)), "cpu")


def _is_dense(tensor: Tensor) -> bool:
    """Does it fill its memory, each place once, in whatever order of dimensions?"""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return False
    size = 1
    for stride, length in sorted((tensor.stride(dim), tensor.shape[dim]) for dim in range(tensor.dim())):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def identity(tensor: Tensor) -> int:
    """That of its storage; 0 where there is none to be seen."""
    try:
        return storage_identity(tensor.untyped_storage())
    except WITHOUT_STORAGE:
        return 0


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Those that hold the memory of a sparse or a wrapping tensor; else the tensor itself."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), Tensor):  # a DTensor also names its device mesh
                yield from plain_tensors(inner)
    else:
        yield from stored_parts(tensor)
