from __future__ import annotations

import json
import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.errors import UsageError
from flatout.machine import torch_builds
from flatout.machine.description import Gpu, Machine
from flatout.machine.torch_builds import DEFAULT_TORCH, install_advice, wheel_index

ROOT = Path(__file__).parents[2]
RECORDED = Machine.from_json(json.loads((ROOT / "tests" / "recorded" / "machine_two_cores.json").read_text()))
CPU = "https://download.pytorch.org/whl/cpu"


@pytest.fixture(autouse=True)
def _linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch_builds, "AMD_DRIVER", tmp_path / "kfd")


def machine(
    driver_cuda: str | None = None,
    capability: tuple[int, int] | None = (9, 0),
    *,
    driver: str | None = "580.82",
    torch: str | None = None,
) -> Machine:
    versions = replace(RECORDED.versions, torch=torch, driver=driver, driver_cuda=driver_cuda)
    gpus = (Gpu(name="NVIDIA X", index=0, compute_capability=capability),)
    return replace(RECORDED, devices=gpus, no_devices_reason=None, versions=versions)


def test_without_a_gpu_the_cpu_build() -> None:
    advice = install_advice(RECORDED, "pip")
    assert advice.lines == (f"pip install torch==2.13.0 torchvision==0.28.0 torchaudio==2.11.0 --index-url {CPU}",)
    assert "no NVIDIA GPU" in advice.reason
    assert len(advice.sources) == 3


@pytest.mark.parametrize(
    ("driver_cuda", "driver", "capability", "torch", "build"),
    [
        ("13.0", "580.82", (9, 0), "2.13.0+cu126", "cu130"),
        ("13.3", "610.1", (9, 0), "2.13.0", "cu132"),
        ("13.1", "590.1", (9, 0), "2.13.0", "cu130"),
        ("12.8", "570.1", (9, 0), "2.11.0", "cu128"),
        ("12.8", "570.1", (9, 0), "2.13.0", "cu126"),
        ("12.4", "550.1", (9, 0), "2.13.0", "cu126"),  # an older minor version of the same major one
        ("13.0", "580.82", (6, 1), "2.13.0", "cu126"),  # Pascal: the builds for CUDA 13 hold no code for it
        ("13.0", "580.82", (12, 0), "2.13.0", "cu130"),
        ("13.0", "580.82", (8, 9), "2.13.0", "cu130"),  # between two that are named
        ("13.0", "580.82", None, "2.13.0", "cu130"),
    ],
)
def test_the_build_for_a_driver_and_a_gpu(
    driver_cuda: str, driver: str, capability: tuple[int, int] | None, torch: str, build: str
) -> None:
    advice = install_advice(machine(driver_cuda, capability, driver=driver, torch=torch), "pip")
    assert advice.build == build
    assert advice.lines[0].endswith(f"--index-url https://download.pytorch.org/whl/{build}")
    assert advice.lines[0].startswith(f"pip install torch=={torch.partition('+')[0]} ")
    assert wheel_index(machine(driver_cuda, capability, driver=driver, torch=torch)) == advice.lines[0].split()[-1]


@pytest.mark.parametrize(
    ("one", "torch", "why"),
    [
        (RECORDED, "2.99.0", "the table of builds does not have torch 2.99.0"),
        (machine(None), None, "does not say which CUDA"),
        (machine("11.8", driver="520.1"), None, "serves CUDA up to 11.8"),
        (machine("12.2", (10, 0), driver="535.1"), None, "none of them fits NVIDIA X"),
        (machine("12.2", driver="515.1"), None, "none of them fits"),
    ],
)
def test_what_is_not_known_is_said(one: Machine, torch: str | None, why: str) -> None:
    advice = install_advice(one, "pip", torch)
    assert (advice.lines, advice.build) == ((), None)
    assert why in advice.reason


def test_another_version_may_be_named() -> None:
    assert "torch==2.11.0 torchvision==0.26.0 " in install_advice(RECORDED, "pip", "2.11.0").lines[0]


def test_conda_makes_the_environment_and_pip_fills_it() -> None:
    create, fill = install_advice(RECORDED, "conda").lines
    assert re.fullmatch(r"conda create --name flatout --channel conda-forge .* python=3\.\d+ pip", create)
    assert fill == f"conda run --name flatout {install_advice(RECORDED, 'pip').lines[0]}"


def test_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "x86-64" in install_advice(RECORDED, "pip").reason
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert install_advice(RECORDED, "pip").lines == (
        "pip install torch==2.13.0 torchvision==0.28.0 torchaudio==2.11.0",
    )


def test_builds_for_amd_are_not_guessed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kfd").touch()
    advice = install_advice(RECORDED, "pip")
    assert advice.lines == ()
    assert "AMD" in advice.reason


def test_another_installer_is_refused() -> None:
    with pytest.raises(UsageError, match="one of pip, conda"):
        install_advice(RECORDED, "poetry")


def test_the_default_is_what_is_developed_with() -> None:
    assert f"torch=={DEFAULT_TORCH}\n" in (ROOT / "constraints.txt").read_text()
    assert (
        install_advice(replace(RECORDED, versions=replace(RECORDED.versions, torch=None)), "pip").torch == DEFAULT_TORCH
    )
