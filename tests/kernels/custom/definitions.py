"""Definitions for tests, as a user's file would hold them, and checks of them in this process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.custom.definition import Definition, read_definition
from flatout.kernels.custom.result import KernelProperty
from flatout.kernels.custom.session import Asked, Session
from flatout.kernels.custom.stages import check_whole

EPS = 1e-5


def reference(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def right(x: Tensor, w: Tensor) -> Tensor:
    """As a kernel would compute it: sums in fp32, one rounding at the end, into memory that it allocates."""
    wide = x.float()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * w.float())
    return y


def defined(kernel: Callable[..., Any], **changes: Any) -> Definition:
    """RMSNorm by default; `changes` are fields of Definition."""
    from flatout.kernels.custom.argument_specs import parse_argument

    specs = changes.pop("inputs", ("float[rows, width]", "float[width]"))
    arguments = tuple(parse_argument(one) for one in specs)
    labels = changes.pop("labels", ("x", "w", "i")[: len(arguments)])
    given = {"reference": reference, **changes}
    return Definition(name="norm.py", kernel=kernel, arguments=arguments, labels=labels, **given)


def written(folder: Path, text: str) -> Definition:
    """What a file of this text defines."""
    file = folder / "written_kernel.py"
    file.write_text(text)
    return read_definition(str(file))


def checked(definition: Definition, **asked: Any) -> tuple[dict[str, KernelProperty], list[dict[str, Any]]]:
    """(properties by name, all messages) of a quick check in this process."""
    messages = io.StringIO()
    wanted = Asked(
        target="norm.py",
        mode="check",
        device="cpu",
        seed=0,
        cases=6,
        quick=True,
        timing=False,
        call_seconds=60.0,
        candidates=[],
        at="",
    )
    check_whole(Session(definition, Asked(**{**wanted, **asked}), messages))
    told = [json.loads(line) for line in messages.getvalue().splitlines()]
    properties = [KernelProperty.from_json(one["property"]) for one in told if "property" in one]
    return {one.name: one for one in properties}, told
