from __future__ import annotations

import doctest
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from flatout.errors import UsageError
from flatout.machine import published_peaks as module
from flatout.machine.nvidia import fast_dtypes
from flatout.machine.published_peaks import GpuEntry, catalogue, catalogue_entry, published_peaks

FOLDER = Path(module.__file__).parent

each = pytest.mark.parametrize("entry", catalogue(), ids=lambda entry: entry.key)


def test_figures_are_dense_and_sourced() -> None:
    found, source = published_peaks("NVIDIA H200")
    assert found is not None
    assert found.flops_per_second["bf16"] == 989.5e12  # the data sheet prints 1,979 with sparsity
    assert found.memory_bytes_per_second == 4.8e12
    assert "dense" in found.convention
    assert source == found.source


def test_an_unknown_gpu_gets_no_other_gpus_figure() -> None:
    found, reason = published_peaks("NVIDIA GeForce RTX 4090 Laptop GPU")
    assert found is None
    assert "RTX 4090 Laptop" in reason


def test_a_name_that_the_driver_gives_to_unlike_cards_gets_no_figure() -> None:
    assert published_peaks("NVIDIA GeForce RTX 3080")[0] is None  # 10 GB and 68 multiprocessors, or 12 and 70
    with pytest.raises(UsageError, match="rtx-3080-10gb"):
        catalogue_entry("NVIDIA GeForce RTX 3080")


def test_a_missing_dtype_has_no_figure() -> None:
    found, _ = published_peaks("Tesla V100-SXM2-16GB")
    assert found is not None
    assert "bf16" not in found.flops_per_second


@each
def test_every_figure_has_a_source(entry: GpuEntry) -> None:
    fields = {"compute_capability", "multiprocessors", "memory_bytes", "memory_bytes_per_second"}
    fields |= {"host_bytes_per_second"} if entry.host_bytes_per_second is not None else set()
    fields |= {"watts"} if entry.watts is not None else set()
    assert set(entry.sources) == fields | set(entry.flops_per_second)
    assert entry.source
    assert all(document.title for document in entry.sources.values())


def test_the_link_to_the_host_is_that_of_the_product() -> None:
    rates = {key: catalogue_entry(key).host_bytes_per_second for key in ("t4", "rtx-4060", "rtx-4090", "h100")}
    assert rates == pytest.approx({"t4": 15.75e9, "rtx-4060": 15.75e9, "rtx-4090": 31.5e9, "h100": 63.0e9}, rel=1e-3)
    assert catalogue_entry("gh200-96gb").host_bytes_per_second is None  # NVLink-C2C, not PCIe


def test_the_power_of_the_board() -> None:
    assert [catalogue_entry(key).watts for key in ("t4", "rtx-4090", "h100", "b200")] == [70, 450, 700, 1000]
    assert catalogue_entry("gh200-96gb").watts is None
    assert all(entry.watts is None or 70 <= entry.watts <= 1000 for entry in catalogue())


def test_every_document_is_used_and_what_no_copy_confirms_is_known() -> None:
    used = {document.title for entry in catalogue() for document in entry.sources.values()}
    assert {fields["title"] for fields in module._read("gpu_documents.toml").values()} == used
    unverified = {(entry.key, figure) for entry in catalogue() for figure, d in entry.sources.items() if not d.verified}
    assert unverified == {("rtx-3070", "bf16"), ("rtx-3070", "fp16")}


@each
def test_a_narrower_dtype_is_no_slower(entry: GpuEntry) -> None:
    known = [entry.flops_per_second[d] for d in ("fp32", "tf32", "bf16", "fp8", "int8") if d in entry.flops_per_second]
    assert known == sorted(known)
    assert entry.flops_per_second.get("fp16", known[-1]) >= entry.flops_per_second.get("tf32", 0)
    if {"fp16", "bf16"} <= entry.flops_per_second.keys():
        assert entry.flops_per_second["fp16"] == entry.flops_per_second["bf16"]


@each
def test_only_dtypes_that_the_generation_has(entry: GpuEntry) -> None:
    assert set(entry.flops_per_second) <= set(fast_dtypes(entry.compute_capability))


# Matrix units over plain fp32; a sparse figure would be twice. GeForce cards and the A10G accumulate at half rate: 2.
RATIOS = {(7, 0): 8, (7, 5): 8, (8, 0): 16, (8, 6): 4, (8, 9): 4, (9, 0): 15, (10, 0): 30, (12, 0): 2}


@each
def test_half_precision_is_neither_sparse_nor_accumulated_in_half(entry: GpuEntry) -> None:
    half = entry.flops_per_second.get("bf16", entry.flops_per_second.get("fp16"))
    if half is not None:
        expected = 2 if "GeForce" in entry.name or entry.key == "a10g" else RATIOS[entry.compute_capability]
        assert half / entry.flops_per_second["fp32"] == pytest.approx(expected, rel=0.1)


@each
def test_sizes_fit_the_published_rate(entry: GpuEntry) -> None:
    cores = 64 if entry.compute_capability < (8, 6) else 128
    clock = entry.flops_per_second["fp32"] / (2 * cores * entry.multiprocessors)
    assert 1.2e9 < clock < 2.7e9  # a boost clock
    assert 8 * 2**30 <= entry.memory_bytes <= 180 * 2**30
    assert entry.memory_bytes % 2**30 == 0
    assert 0.2e12 < entry.memory_bytes_per_second < 8e12


@pytest.mark.parametrize("name", ["rtx-4090", "RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "GeForce RTX 4090"])
def test_a_product_is_found_however_it_is_spelt(name: str) -> None:
    assert catalogue_entry(name).key == "rtx-4090"


@each
def test_every_entry_is_found_by_its_names(entry: GpuEntry) -> None:
    assert entry.key == entry.key.lower()
    assert catalogue_entry(entry.key) is entry
    if entry.driver_name is not None:
        assert catalogue_entry(entry.driver_name) is entry
        assert published_peaks(entry.driver_name) == (entry, entry.source)


def test_names_stand_for_one_product() -> None:
    names = Counter(entry.driver_name for entry in catalogue() if entry.driver_name)
    simplified = Counter(module._simplified(entry.key) for entry in catalogue())
    assert {name for name, count in (names + simplified).items() if count > 1} == set()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rtx 4909", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090"),
        ("a100", "a100-40gb, a100-80gb, a100-40gb-pcie, a100-80gb-pcie"),
        ("v100", "v100-16gb, v100-32gb, v100-16gb-pcie, v100-32gb-pcie"),
        ("rtx 3060", "rtx-3060-12gb"),
    ],
)
def test_an_unknown_name_hears_of_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UsageError) as raised:
        catalogue_entry(name)
    assert raised.value.what == f"GPU {name!r} is not in the catalogue"
    assert near in raised.value.limit
    assert raised.value.remedy


@pytest.mark.parametrize("name", ["", "mi300x"])
def test_a_name_like_none_hears_of_all(name: str) -> None:
    with pytest.raises(UsageError, match=r"it holds p100, .*, rtx-5090"):
        catalogue_entry(name)


def test_importing_reads_nothing() -> None:
    check = (
        "import flatout.machine.published_peaks as p; assert p._entries.cache_info().misses == 0; "
        "p.catalogue_entry('t4'); assert p._entries.cache_info().misses == 1"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", check], check=True)


def test_the_package_holds_the_data() -> None:
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["flatout"]
    packed = {path.name for pattern in patterns for path in FOLDER.parent.glob(pattern)}
    assert {"gpu_catalogue.toml", "gpu_documents.toml"} <= packed


def test_the_examples_of_the_module_run() -> None:
    assert doctest.testmod(module).failed == 0
