"""The precision of fp32 products where a program sets torch's newer switches, which contradict its older one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flatout.precision.matmul import current_matmul_precision, matmul_precision

ONEDNN: Any = torch.backends.mkldnn
GENERIC: Any = torch.backends
CUDA: Any = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def switches_without_a_value() -> Iterator[None]:
    switches = (GENERIC, ONEDNN.matmul, CUDA)
    before = [one.fp32_precision for one in switches]
    for one in switches:
        one.fp32_precision = "none"
    yield
    for one, value in zip(switches, before, strict=True):
        one.fp32_precision = value


@pytest.mark.parametrize(("switch", "held"), [("tf32", "high"), ("bf16", "medium")])
def test_a_newer_switch_counts_where_torch_refuses_to_say(switch: str, held: str) -> None:
    assert current_matmul_precision() == "highest"
    GENERIC.fp32_precision = switch
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    assert current_matmul_precision() == held


def test_the_switch_of_one_backend_counts() -> None:
    CUDA.fp32_precision = "tf32"
    assert current_matmul_precision() == "high"


@pytest.mark.parametrize("value", ["highest", "high", "medium"])
def test_nothing_stays_of_a_context(value: str) -> None:
    GENERIC.fp32_precision = "tf32"
    with matmul_precision(value):
        assert torch.get_float32_matmul_precision() == current_matmul_precision() == value
    assert (CUDA.fp32_precision, ONEDNN.matmul.fp32_precision) == ("tf32", "tf32")
    assert current_matmul_precision() == "high"
    GENERIC.fp32_precision = "none"  # those of the backends follow, as they did before
    assert current_matmul_precision() == torch.get_float32_matmul_precision() == "highest"
