"""Cuts a whole model: first all of it is planned and checked, then every rank keeps its part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any  # Any: a module, called by its own signature

from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.parallel.tensor import layers
from flatout.parallel.tensor.parts import Across, Cut
from flatout.parallel.tensor.random import OwnStream
from flatout.parallel.tensor.rules import KNOWN, Rule, rule_of
from flatout.units import counted

_OTHERWISE = "use parallel = 'fsdp' without tensor_ranks, which works for any model"


@dataclass(kw_only=True)
class _Planned:
    """What happens to one layer."""

    forward: Callable[..., Tensor] | None
    """None: it only holds a parameter that another layer uses."""
    cuts: dict[str, Cut] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Entered:
    """A module whose input begins a part that each rank computes alone."""

    module: nn.Module
    rule: Rule
    root: nn.Module
    """The module that the rule is for."""
    arguments: tuple[str, ...]


class Splitting:
    """The plan for one model. Raises UsageError, on every rank alike, for one that cannot be cut so."""

    def __init__(self, model: nn.Module, across: Across) -> None:
        self._across = across
        self._planned: dict[nn.Module, _Planned] = {}
        self._entered: list[_Entered] = []
        self._divided: list[tuple[nn.Module, str]] = []
        self._tables: dict[nn.Module, _Planned] = {}
        names = {module: name for name, module in model.named_modules()}
        for module, name in names.items():
            rule = rule_of(module)
            if rule is not None:
                self._plan(name or type(module).__name__, module, rule)
        if not self._planned:
            raise UsageError(
                f"layers are cut over ranks, and there is no rule for {type(model).__name__}",
                limit=f"tensor parallelism knows the blocks of {KNOWN}",
                remedy=_OTHERWISE,
            )
        self._check_shared(model, names)
        self._keep_tables_in_use(model)

    def carry_out(self) -> None:
        """Every rank keeps its part of each parameter. Nothing is sent."""
        for one in self._entered:
            _enter(one, self._across)
        for layer, planned in (self._planned | self._tables).items():
            for name, cut in planned.cuts.items():
                layers.cut_parameter(layer, name, cut)
            if planned.forward is not None:
                layers.set_forward(layer, planned.forward)
        for module, attribute in self._divided:
            module.__dict__[attribute] //= self._across.count

    # planning

    def _plan(self, name: str, module: nn.Module, rule: Rule) -> None:
        for attribute, value, meaning in rule.refused:
            if getattr(module, attribute, None) == value:
                raise UsageError(
                    f"{name} is a {type(module).__name__} whose {attribute} is {value}",
                    limit=f"tensor parallelism has no rule for that: {meaning}",
                    remedy=_OTHERWISE,
                )
        for path in (*rule.columns, *rule.rows):
            self._is_transposed(f"{name}.{path}", module.get_submodule(path))  # refuses other kinds of layers
        unit = 1 if rule.head_width is None else rule.head_width(module)
        for path, fused in rule.columns.items():
            self._plan_columns(f"{name}.{path}", module.get_submodule(path), fused, unit)
        for path in rule.rows:
            self._plan_rows(f"{name}.{path}", module.get_submodule(path))
        for path, arguments in rule.inputs.items():
            inner = module.get_submodule(path)
            self._entered.append(_Entered(module=inner, rule=rule, root=module, arguments=arguments))
        self._divided += [(module.get_submodule(path), attribute) for path, attribute in rule.divided]
        for path in rule.embeddings:
            self._plan_embedding(module.get_submodule(path))
        for path in rule.scores:
            self._plan_scores(module, module.get_submodule(path), rule)

    def _plan_columns(self, name: str, layer: nn.Module, fused: int, unit: int) -> None:
        transposed = self._is_transposed(name, layer)
        weight = layer.get_parameter("weight")
        outputs = weight.shape[1 if transposed else 0] // fused
        if outputs // unit % self._across.count or outputs % unit:
            what = counted(outputs // unit, "head") if unit > 1 else counted(outputs, "output")
            fewer = (
                f"share it among a number of ranks that divides {outputs // unit}, or " if outputs // unit > 1 else ""
            )
            raise UsageError(
                f"{name} has {what}, and {self._across.count} ranks share it",
                limit="tensor parallelism gives each rank as many whole ones",
                remedy=fewer + _OTHERWISE,
            )
        planned = _Planned(forward=layers.columns_forward)
        planned.cuts["weight"] = self._cut(weight, 1 if transposed else 0, fused)
        if layer.bias is not None:
            planned.cuts["bias"] = self._cut(layer.get_parameter("bias"), 0, fused)
        self._planned[layer] = planned

    def _plan_rows(self, name: str, layer: nn.Module) -> None:
        cut = self._cut(layer.get_parameter("weight"), 0 if self._is_transposed(name, layer) else 1)
        self._planned[layer] = _Planned(forward=layers.rows_forward, cuts={"weight": cut})

    def _is_transposed(self, name: str, layer: nn.Module) -> bool:
        kind = type(layer)
        if kind is nn.Linear:
            return False
        if f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D":
            return True
        raise UsageError(
            f"{name} is a {kind.__name__}",
            limit="tensor parallelism cuts layers of type Linear and Conv1D",
            remedy=_OTHERWISE,
        )

    def _plan_embedding(self, layer: nn.Module) -> None:
        plain = isinstance(layer, nn.Embedding) and not (layer.max_norm or layer.scale_grad_by_freq or layer.sparse)
        if not plain:
            return
        cut = self._cut(layer.get_parameter("weight"), 0)
        if self._each_has_a_row(cut):
            self._tables[layer] = _Planned(forward=layers.embedding_forward, cuts={"weight": cut})

    def _plan_scores(self, module: nn.Module, layer: nn.Module, rule: Rule) -> None:
        if type(layer) is not nn.Linear:
            return
        cut = self._cut(layer.weight, 0)
        if not self._each_has_a_row(cut):
            return
        planned = self._tables[layer] = _Planned(forward=layers.scores_forward, cuts={"weight": cut})
        if layer.bias is None:
            return
        planned.cuts["bias"] = self._cut(layer.bias, 0)
        for name in rule.shared:
            if getattr(module, name, None) is layer.bias:
                self._tables[module] = _Planned(forward=None, cuts={name: planned.cuts["bias"]})

    def _each_has_a_row(self, cut: Cut) -> bool:
        """FSDP2, which shards the parts, takes none without an element."""
        return cut.chunk * (self._across.count - 1) < cut.shape[0]

    def _cut(self, parameter: Tensor, dim: int, fused: int = 1) -> Cut:
        return Cut(across=self._across, shape=tuple(parameter.shape), dim=dim, fused=fused)

    # parameters that several layers share

    def _check_shared(self, model: nn.Module, names: dict[nn.Module, str]) -> None:
        cut = {id(layer.get_parameter(name)) for layer, name in _places(self._planned)}
        seen: dict[int, str] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in cut:
                    continue
                path = f"{names[module]}.{name}"
                if id(parameter) in seen:
                    raise UsageError(
                        f"{seen[id(parameter)]} and {path} are the same parameter",
                        limit="tensor parallelism cuts matrices that one layer uses",
                        remedy=_OTHERWISE,
                    )
                seen[id(parameter)] = path

    def _keep_tables_in_use(self, model: nn.Module) -> None:
        """Leave tables whole that something else uses too, and all that share a parameter with these."""
        while True:
            listed = {(layer, name) for layer, name in _places(self._tables)}
            other = {
                id(parameter)
                for module in model.modules()
                for name, parameter in module.named_parameters(recurse=False)
                if (module, name) not in listed
            }
            whole = [
                layer
                for layer, planned in self._tables.items()
                if any(id(layer.get_parameter(name)) in other for name in planned.cuts)
            ]
            if not whole:
                return
            for layer in whole:
                del self._tables[layer]


def _places(planned: dict[nn.Module, _Planned]) -> Iterator[tuple[nn.Module, str]]:
    for layer, one in planned.items():
        for name in one.cuts:
            yield layer, name


def _enter(one: _Entered, across: Across) -> None:
    order = list(inspect.signature(type(one.module).forward).parameters)[1:]
    hook = layers.Entrance(one.arguments, tuple(order.index(name) for name in one.arguments), across)
    if one.rule.dropout is not None:
        path, attribute = one.rule.dropout
        stream = hook.own_stream = OwnStream(across)
        within = _path_from(one, path)
        hook.dropout = f"{within}.{attribute}" if within else attribute
        for row in one.rule.rows:  # what comes after it in the module is the same on all ranks again
            one.root.get_submodule(row).__dict__[layers.OWN_STREAM] = stream
        one.module.register_forward_hook(stream.end, always_call=True)
    one.module.register_forward_pre_hook(hook, with_kwargs=True)


def _path_from(one: _Entered, path: str) -> str:
    """A path in the rule's module as one in the module that is entered."""
    entered: Any = next(name for name, module in one.root.named_modules() if module is one.module)
    return path.removeprefix(entered).removeprefix(".") if entered else path
