"""Peaks that GPU vendors publish: a ceiling where none was measured, labelled as such, never another GPU's.

Convention: **dense** products (data sheets like to print the figure with 2:4 sparsity, twice as high), matrix units,
accumulation in fp32 where the vendor states several, boost clock. Memory: the peak of the bus. Every figure names its
document; what has none is left out. The figures are in gpu_catalogue.toml, their documents in gpu_documents.toml.

A machine's own GPU is looked up by the exact name that its driver gives, because a laptop's "4090" is another chip;
users may name a product more loosely:

>>> catalogue_entry("rtx4090").flops_per_second["bf16"] / 1e12
165.2
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

from flatout.decoding import decode
from flatout.errors import UsageError

PCIE_LANE_BYTES_PER_SECOND = {"3.0": 8e9 / 8 * 128 / 130, "4.0": 16e9 / 8 * 128 / 130, "5.0": 32e9 / 8 * 128 / 130}
"""By generation: transfers a second of the standard, 128 bits of each 130 being data."""
CONVENTION = "dense, fp32 accumulation, boost clock"


@dataclass(frozen=True, kw_only=True)
class Document:
    """Where a figure comes from: an entry of gpu_documents.toml."""

    title: str  # with the table
    url: str  # empty where it has none of its own
    seen: str  # where a copy was read, or who quotes it; empty: nowhere, the figure is from memory of the document

    @property
    def verified(self) -> bool:
        return bool(self.seen)


@dataclass(frozen=True, kw_only=True)
class GpuEntry:
    """One product of the catalogue: its size, its published figures and where each comes from.

    `memory_bytes` is the memory of the product as sold, its "GB" read as GiB: 24 * 2**30 for a card of 24 GB. A process
    gets less. The driver keeps some hundred MiB, and ECC, where it is on with GDDR6, a sixteenth: torch has reported
    22.1 GiB on an A10G of 24 GB, 14.7 on a T4 of 16, 31.4 on an RTX 5090 of 32, 139.8 on an H200 of 141.
    """

    key: str  # "rtx-4090", "a100-80gb"; without a form factor, the SXM module
    name: str
    driver_name: str | None  # None: the driver calls unlike products the same
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: Mapping[str, float]  # by dtype; a missing dtype has no published figure; int8 counts integer ones
    watts: float | None  # of the board; None: no figure has a document
    host_bytes_per_second: float | None  # each way, by generation and lanes of its PCIe link; a slot may give it less
    source: str  # the document of most figures
    sources: Mapping[str, Document]  # by field, or dtype
    convention: str = CONVENTION


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """An entry of gpu_catalogue.toml, in the units of data sheets."""

    name: str
    driver_name: str | None = None
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_gib: int
    memory_gigabytes_per_second: float
    watts: float | None = None
    pcie: str | None = None
    tera: Mapping[str, float]
    source: str
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Catalogue:
    """gpu_catalogue.toml."""

    sources_of_all: Mapping[str, str]
    gpus: Mapping[str, _Fields]


_FIGURES = ("compute_capability", "multiprocessors", "memory_bytes", "memory_bytes_per_second")


def catalogue() -> tuple[GpuEntry, ...]:
    """Every product of the catalogue, in the order of its file: by generation."""
    return tuple(_entries().values())


def catalogue_entry(name: str) -> GpuEntry:
    """The product of that catalogue key or driver's name; case, spaces, dashes and the vendor's name do not matter.

    >>> catalogue_entry("NVIDIA GeForce RTX 4090") is catalogue_entry("RTX 4090") is catalogue_entry("rtx-4090")
    True
    """
    names = _names()
    found = names.get(_simplified(name))
    if found is not None:
        return found
    near = _nearest(_simplified(name), names)
    raise UsageError(
        f"GPU {name!r} is not in the catalogue",
        limit=f"nearest by name: {', '.join(near)}" if near else f"it holds {', '.join(_entries())}",
        remedy="name one of these, or measure the GPU itself: flatout check --measure",
    )


def published_peaks(gpu_name: str) -> tuple[GpuEntry | None, str]:
    """The entry of the GPU that the driver calls so, and its source; or None and why there is none."""
    for entry in catalogue():
        if entry.driver_name == gpu_name:
            return entry, entry.source
    return None, f"no published figures for {gpu_name!r} are in the table; measure: flatout check --measure"


def _nearest(wanted: str, names: Mapping[str, GpuEntry]) -> list[str]:
    """Keys whose name begins so ("a100" is four products), then those spelt much like it."""
    begun = [name for name in names if wanted and name.startswith(wanted)]
    return list(dict.fromkeys(names[name].key for name in begun + difflib.get_close_matches(wanted, names, n=4)))[:4]


def _simplified(name: str) -> str:
    """
    >>> _simplified("NVIDIA GeForce RTX 4090")
    'rtx4090'
    """
    letters = "".join(letter for letter in name.casefold() if letter.isalnum())
    for word in ("nvidia", "geforce", "tesla"):  # in the order in which a driver puts them
        letters = letters.removeprefix(word)
    return letters


@functools.cache
def _names() -> dict[str, GpuEntry]:
    """By every simplified name that stands for exactly one product."""
    driver_names = {_simplified(entry.driver_name): entry for entry in catalogue() if entry.driver_name}
    return driver_names | {_simplified(entry.key): entry for entry in catalogue()}


@functools.cache
def _entries() -> dict[str, GpuEntry]:
    """By key. Read when first asked for, so that importing this reads nothing."""
    documents = {key: decode(Document, one) for key, one in _read("gpu_documents.toml").items()}
    catalogue = decode(_Catalogue, _read("gpu_catalogue.toml"))
    return {key: _entry(key, one, catalogue.sources_of_all, documents) for key, one in catalogue.gpus.items()}


def _read(file_name: str) -> Mapping[str, object]:
    return tomllib.loads(resources.files("flatout.machine").joinpath(file_name).read_text(encoding="utf-8"))


def _entry(key: str, fields: _Fields, sources_of_all: Mapping[str, str], documents: Mapping[str, Document]) -> GpuEntry:
    figures = (*_FIGURES, *fields.tera)
    sources = {**dict.fromkeys(figures, fields.source), **sources_of_all, **fields.sources}
    link = sources.pop("pcie")
    if fields.pcie is not None:
        sources["host_bytes_per_second"] = link
    if fields.watts is None:
        sources.pop("watts")
    return GpuEntry(
        key=key,
        name=fields.name,
        driver_name=fields.driver_name,
        compute_capability=fields.compute_capability,
        multiprocessors=fields.multiprocessors,
        memory_bytes=fields.memory_gib * 2**30,
        memory_bytes_per_second=fields.memory_gigabytes_per_second * 1e9,
        flops_per_second={dtype: value * 1e12 for dtype, value in fields.tera.items()},
        watts=fields.watts,
        host_bytes_per_second=None if fields.pcie is None else _pcie_bytes_per_second(fields.pcie),
        source=documents[fields.source].title,
        sources={figure: documents[source] for figure, source in sources.items()},
    )


def _pcie_bytes_per_second(link: str) -> float:
    """
    >>> round(_pcie_bytes_per_second("4.0 x16") / 1e9, 1)
    31.5
    """
    generation, _, lanes = link.partition(" x")
    return PCIE_LANE_BYTES_PER_SECOND[generation] * int(lanes)
