"""What a compiled forward and backward hold: their graphs as torch.compile would cut them, run without computing.

AOT autograd makes the two graphs of a module's call, its min-cut partitioner decides what is kept between them, and
inductor's decompositions split large operations into small ones. Of a graph, what a kernel must write is a tensor:
results of products, reductions and everything that another kernel reads whole, and what the graph returns. Element by
element operations are computed where they are read. Each tensor lives until the last kernel that reads it.

Fusion is inductor's own in the end: what it fuses more or less than these rules is in the stated uncertainty.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from flatout.memory.fake_run import FakeRun
from flatout.memory.tracking import unseen
from flatout.replaced import settings_changed
from flatout.torch_private.ahead_of_time import (
    Run,
    aot_function,
    boxed,
    min_cut_rematerialization_partition,
    reparametrized,
    select_decomp_table,
)
from flatout.torch_private.attributes import COMPILING_FLAG, plain_call
from flatout.torch_private.dispatch import tree_leaves, tree_map_only


def _named(words: str) -> frozenset[str]:
    return frozenset(words.split())


_VIEWS = _named(
    "view _unsafe_view reshape permute transpose t expand slice select squeeze unsqueeze as_strided alias detach split "
    "split_with_sizes unbind diagonal _reshape_alias"
)
_READ_WHERE_USED = _named(
    "clone convert_element_type full full_like zeros zeros_like ones ones_like scalar_tensor iota arange rand "
    "rand_like randn embedding index _unsafe_index gather where constant_pad_nd _to_copy copy lift_fresh_copy fill"
)
"""Besides what torch tags as pointwise."""
_WRITTEN_ELEMENT_BY_ELEMENT = _named(
    "sum mean amax amin max min var var_mean prod any all argmax argmin std index_put _unsafe_index_put scatter "
    "scatter_add scatter_reduce index_add"
)
"""Reductions and scatters: what they read is computed where they read it."""


class CompiledCall:
    """A module's call as its compiled form holds memory. On fake tensors, within `world`, which is their fake mode."""

    def __init__(self, module: nn.Module, world: FakeRun) -> None:
        self._module, self._world = module, world
        self._made: dict[tuple[tuple[torch.Size, torch.dtype], ...], Callable[..., object]] = {}

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return plain_call(self._module)(*args, **kwargs)
        named = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        key = tuple((one.shape, one.dtype) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        if key not in self._made:
            made = aot_function(
                self._plainly,
                fw_compiler=_compiler,
                bw_compiler=_compiler,
                partition_fn=min_cut_rematerialization_partition,
                decompositions=select_decomp_table(),
            )
            with unseen(), self._world:
                made(named, *args, **kwargs)  # traced here; what that allocates is not the program's
            self._made[key] = made
        return self._made[key](named, *args, **kwargs)

    def _plainly(self, named: dict[str, Tensor], *args: object, **kwargs: object) -> object:
        # Code that asks torch.compiler.is_compiling() takes the branch that it takes under torch.compile.
        compiling = settings_changed(torch.compiler, **{COMPILING_FLAG: True})
        with reparametrized(self._module, named, tie_weights=True), compiling:
            return plain_call(self._module)(*args, **kwargs)


def _compiler(gm: GraphModule, example_inputs: Sequence[object]) -> Run:
    return boxed(_Kernels(gm.graph).run)


class _Kernels:
    """The graph as a list of kernels: what each writes, and after which of them a tensor is not read any more."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = list(graph.nodes)
        self._output = self._nodes[-1]
        self._written = {node for node in self._nodes if _is_written(node)}
        sources: dict[Node, frozenset[Node]] = {}
        last: dict[Node, Node] = {}
        for node in self._nodes:
            read: frozenset[Node] = frozenset().union(*(sources[one] for one in node.all_input_nodes))
            sources[node] = frozenset([node]) if node in self._written else read
            if node in self._written or node is self._output:
                last.update(dict.fromkeys(read, node))
        self._freed: dict[Node, list[Node]] = {}
        for source, node in last.items():
            self._freed.setdefault(node, []).append(source)
        self._returned = sources[self._output]
        self._channels_last = any(_is_convolution(one) and _on_cpu(one) for one in self._nodes)

    def run(self, args: list[object]) -> list[object]:
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        held: dict[Node, object] = dict(zip(inputs, args, strict=True))
        args.clear()
        for node in [one for one in held if one not in self._returned and not one.users]:
            del held[node]
        for node in self._nodes:
            if node.op == "get_attr":
                held[node] = node.meta.get("val")
            elif node in self._written and node.op != "placeholder":
                held[node] = self._kernel(node, held)
            for source in self._freed.get(node, ()):
                if node is not self._output:
                    held.pop(source, None)
        return [self._value(one, held) if isinstance(one, Node) else one for one in self._output.args[0]]

    def _kernel(self, node: Node, held: dict[Node, object]) -> object:
        if _kind(node) == "opaque":
            args, kwargs = map_arg((node.args, node.kwargs), lambda one: self._value(one, held))
            if self._channels_last and _is_convolution(node):
                args = tree_map_only(Tensor, _in_channels_last, args)
            assert callable(node.target), "the operation of a call_function"
            return node.target(*args, **kwargs)
        made = node.meta["val"]
        if isinstance(made, (tuple, list)):
            return [self._like(one) for one in made]
        for source in self._freed.get(node, ()) if _kind(node) == "pointwise" else ():
            given = held.get(source)
            if source.op != "placeholder" and isinstance(given, Tensor) and _takes_the_same(given, made):
                return given.as_strided(made.shape, made.stride(), 0)  # written in its place
        return self._like(made)

    def _like(self, made: Tensor) -> Tensor:
        if self._channels_last and made.dim() == 4:
            layout = torch.channels_last
            return torch.empty(made.shape, dtype=made.dtype, device=made.device, memory_format=layout)
        return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=made.device)

    def _value(self, node: Node, held: dict[Node, object]) -> Any:  # whatever the graph computes there
        """The tensor of a node that is written, or a view of such."""
        if node in held:
            return held[node]
        base, picked = node, list[int]()
        while base not in held:
            inner, *others = base.args
            if base.target is operator.getitem and isinstance(others[0], int):
                picked.append(others[0])
            assert isinstance(inner, Node), "a view is of what another node computes"
            base = inner
        root = held[base]
        for index in reversed(picked):
            root = root[index] if isinstance(root, (tuple, list)) else root
        made = node.meta["val"]
        if not isinstance(root, Tensor) or (node.target is operator.getitem and isinstance(held[base], (tuple, list))):
            return root
        return root.as_strided(made.shape, made.stride(), made.storage_offset())


def _is_convolution(node: Node) -> bool:
    return node.op == "call_function" and "convolution" in str(node.target)


def _on_cpu(node: Node) -> bool:
    made = node.meta["val"]
    first = made if isinstance(made, Tensor) else next(one for one in made if one is not None)
    return bool(first.device.type == "cpu" and first.dim() == 4)


def _in_channels_last(tensor: Tensor) -> Tensor:
    """On the CPU inductor gives convolutions nothing else; what was laid out otherwise is copied."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _takes_the_same(given: Tensor, made: Tensor) -> bool:
    return given.dtype == made.dtype and given.untyped_storage().nbytes() == made.untyped_storage().nbytes()


def _kind(node: Node) -> str:
    """view, pointwise (read where it is used), reduction, opaque (a kernel of its own), or none of these."""
    if node.op != "call_function":
        return "none"
    if node.target is operator.getitem:
        return "view"
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name in _VIEWS:
        return "view"
    if name in _WRITTEN_ELEMENT_BY_ELEMENT:
        return "reduction"
    if name in _READ_WHERE_USED or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return "pointwise"
    return "opaque"


def _is_written(node: Node) -> bool:
    kind = _kind(node)
    if node.op == "placeholder" or kind in ("reduction", "opaque"):
        return True
    return kind == "pointwise" and _is_read_whole(node)


def _is_read_whole(node: Node) -> bool:
    """Is it returned, or read by a kernel that computes nothing itself where it reads?"""
    for user in node.users:
        kind = _kind(user)
        if user.op == "output" or kind == "opaque" or (kind == "view" and _is_read_whole(user)):
            return True
    return False
