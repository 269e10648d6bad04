"""Loads a state dict of transformers into one of our models, strictly: mismatches are listed, nothing is guessed.

The model is built on the meta device and its parameters are made here, so no memory or time goes into initial values
that would be overwritten, and the caller's tensors are copied, never shared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatout.errors import UsageError

NAMES_LISTED = 8


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a state dict of transformers holds one of our parameters."""

    parts: tuple[str, ...]
    """Its names there; several are concatenated along the rows, as query, key and value are."""
    aliases: tuple[str, ...] = ()
    """Other names under which the same tensor (tied) may be stored; any one suffices."""
    aliases_agree: bool = True
    """Two names with different tensors are an error; False: the first name counts."""
    transposed: bool = False
    rows: int | None = None
    """Rows there, if ours is padded; None = as many as ours."""


def load_strictly(
    model: nn.Module,
    sources: Mapping[str, Source],
    state_dict: Mapping[str, Tensor],
    *,
    prefix: str,
    ignored: re.Pattern[str],
    rename: Callable[[str], str] = str,
) -> None:
    """Fill in the parameters of `model` (on the meta device). `prefix` may precede names.

    ignored: names (after the prefix) that hold nothing the model needs. rename: old name -> current name.
    Tied parameters of ours are named once in `sources`; the caller ties them again afterwards.
    """
    given = _given(state_dict, prefix, ignored, rename)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    missing, misfits, used = [], [], set()
    parts: dict[str, list[Tensor]] = {}
    for ours, source in sources.items():
        parts[ours] = []
        for name in source.parts:
            found = [other for other in (name, *source.aliases) if other in given]
            used.update(found)
            if not found:
                missing.append(name)
                continue
            if source.aliases_agree:
                _check_tied(found, given)
            parts[ours].append(given[found[0]])
            misfits += _misfit(found[0], given[found[0]], _foreign_shape(shapes[ours], source))
    unexpected = [name for name in given if name not in used]
    if missing or unexpected or misfits:
        lists = (_listed("missing", missing), _listed("unexpected", unexpected), _listed("that do not match", misfits))
        what = f"the state dict does not fit {model.__class__.__name__}: {'; '.join(filter(None, lists))}"
        raise UsageError(what, remedy="make the config with from_hugging_face from the config of these weights")
    for ours, source in sources.items():
        owner, _, leaf = ours.rpartition(".")
        joined = _joined(parts[ours], shapes[ours], transposed=source.transposed)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(joined))


def _given(
    state_dict: Mapping[str, Tensor], prefix: str, ignored: re.Pattern[str], rename: Callable[[str], str]
) -> dict[str, Tensor]:
    if not isinstance(state_dict, Mapping):
        what = f"the state dict is a {type(state_dict).__name__}"
        raise UsageError(what, limit="it must map names to tensors", remedy="pass model.state_dict()")
    named = {rename(name.removeprefix(prefix)): tensor for name, tensor in state_dict.items()}
    return {name: tensor for name, tensor in named.items() if not ignored.fullmatch(name)}


def _check_tied(names: list[str], given: Mapping[str, Tensor]) -> None:
    first, *others = names
    for other in others:
        a, b = given[first], given[other]
        same = a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape) or torch.equal(a, b)
        if not same:
            what = f"{first} and {other} differ"
            limit = "the config says that they are one tensor"
            raise UsageError(what, limit=limit, remedy="set tied=False if they were trained separately")


def _foreign_shape(ours: tuple[int, ...], source: Source) -> tuple[int, ...]:
    rows = source.rows if source.rows is not None else ours[0] // len(source.parts)
    shape = (rows, *ours[1:])
    return shape[::-1] if source.transposed else shape


def _misfit(name: str, tensor: Tensor, expected: tuple[int, ...]) -> list[str]:
    if tuple(tensor.shape) != expected:
        return [f"{name} is {list(tensor.shape)} and not {list(expected)}"]
    return [] if tensor.is_floating_point() else [f"{name} is {tensor.dtype} and not floating point"]


def _listed(kind: str, names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return ""
    more = f" and {len(names) - NAMES_LISTED} more" if len(names) > NAMES_LISTED else ""
    return f"{len(names)} {kind} ({', '.join(names[:NAMES_LISTED])}{more})"


def _joined(parts: list[Tensor], shape: tuple[int, ...], *, transposed: bool) -> Tensor:
    """The parts concatenated along the rows into a new tensor; rows that are left over are zero."""
    joined = torch.zeros(shape, dtype=parts[0].dtype, device=parts[0].device)
    row = 0
    for part in parts:
        rows = part.detach().t() if transposed else part.detach()
        joined[row : row + len(rows)].copy_(rows)
        row += len(rows)
    return joined
