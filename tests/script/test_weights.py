"""Weights are sampled between passes, whatever kind of tensor they are."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from flatout.script.weights import WeightProbe


def change_seen(weight: Tensor) -> bool:
    probe = WeightProbe()
    for changes in (False, True):
        loss = (weight * weight).sum()
        probe.changed((loss,))
        loss.backward()
        probe.remember()
        with torch.no_grad():
            weight += changes
    return probe.changed(((weight * weight).sum(),))


def test_a_change_is_seen() -> None:
    assert change_seen(torch.ones(4, requires_grad=True))


def test_a_change_of_a_part_of_a_sharded_weight_is_seen(tmp_path: Path) -> None:
    """Reading the whole, without the dispatch that makes it of its parts, would end the process."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        weight = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (1,))).requires_grad_()
        assert change_seen(weight)
    finally:
        distributed.destroy_process_group()


def test_what_cannot_be_read_is_left_alone() -> None:
    class Wrapper(Tensor):
        @staticmethod
        def __new__(cls) -> Wrapper:
            made: Wrapper = Tensor._make_wrapper_subclass(cls, (4,), requires_grad=True)
            return made

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
            return torch.ones(4) if func is torch.ops.aten.mul.Tensor else NotImplemented

    probe = WeightProbe()
    weight = Wrapper()
    assert not probe.changed(((weight * 2).sum(),))
    probe.remember()
    assert not probe.changed(((weight * 2).sum(),))
