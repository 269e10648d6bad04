"""--device: one GPU is left to be seen, in whatever words CUDA_VISIBLE_DEVICES had; what is not there is named."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from flatout import environment
from flatout.errors import UsageError
from flatout.machine import visible_devices
from flatout.machine.description import Gpu, Machine
from flatout.machine.visible_devices import show_only
from tests.levers.test_catalogue import AMPERE, WITH_GPU

TWO = tuple(Gpu(name=f"NVIDIA {name}", index=index, uuid=f"GPU-{name}") for index, name in enumerate(("A", "B")))
HERE = replace(WITH_GPU, devices=TWO)
WITHOUT = replace(WITH_GPU, devices=(), no_devices_reason="no NVIDIA driver is installed")


def seen(monkeypatch: pytest.MonkeyPatch, device: str, *, told: str | None = None, machine: Machine = HERE) -> str:
    monkeypatch.setattr(visible_devices, "detect", lambda: machine)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told or "")
    if told is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    show_only(device)
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    ("device", "told", "left"),
    [
        ("cuda:1", None, "GPU-B"),
        ("cuda:0", None, "GPU-A"),
        ("cuda", None, "GPU-A"),
        ("cuda:1", "1, 0", "0"),
        ("cuda:0", "GPU-A,GPU-B", "GPU-A"),
        ("cpu", None, ""),
        ("cpu", "0,1", ""),
    ],
)
def test_one_is_left(monkeypatch: pytest.MonkeyPatch, device: str, told: str | None, left: str) -> None:
    assert seen(monkeypatch, device, told=told) == left


def test_a_gpu_without_identity_goes_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    anonymous = replace(HERE, devices=tuple(replace(one, uuid=None) for one in TWO))
    assert seen(monkeypatch, "cuda:1", machine=anonymous) == "1"


@pytest.mark.parametrize(
    ("device", "machine", "said"),
    [
        ("cuda:2", HERE, r"--device is 'cuda:2'; available are cpu, cuda:0 \(NVIDIA A\), cuda:1 \(NVIDIA B\); .*check"),
        ("gpu", HERE, r"--device is 'gpu'; available are cpu, cuda:0 .*name one of these"),
        ("cuda:-1", HERE, "name one of these"),
        ("cuda:", HERE, "name one of these"),
        ("", HERE, "name one of these"),
        ("cuda", WITHOUT, r"only cpu is available: no NVIDIA driver is installed; .*flatout check"),
        ("cuda:0", AMPERE, "only cpu is available: torch is a build for the CPU"),
    ],
)
def test_what_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, device: str, machine: Machine, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        seen(monkeypatch, device, machine=machine)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(("before", "after"), [(None, {"A": "1"}), ("0,1", {"A": "1", "CUDA_VISIBLE_DEVICES": "0,1"})])
def test_a_process_that_starts_over_is_given_what_was_told(before: str | None, after: dict[str, str]) -> None:
    assert environment.with_visible({"A": "1", "CUDA_VISIBLE_DEVICES": "GPU-B"}, before) == after
