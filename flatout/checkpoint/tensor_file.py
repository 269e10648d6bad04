"""One safetensors file: written in a single pass that also hashes it, read by the safetensors library.

The library's own writer would require reading the file again for its checksum, or holding all of it in memory; and it
reports a full disk only as text. The format is a length, a JSON header and the bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from flatout.checkpoint.disk import HashedFile
from flatout.checkpoint.storages import NATIVE, flat_bytes


def write_tensors(file: HashedFile, tensors: Mapping[str, torch.Tensor], **about: str) -> None:
    """Tensors are copied to the host one by one, so that only one at a time is in memory twice. Raises OSError.

    about: further entries of the header.
    """
    # wide elements first, so that each is aligned; the format allows no gaps
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    file.write(_header(dict(ordered), about))
    for _, tensor in ordered:
        file.write(flat_bytes(tensor.detach().cpu().contiguous()).numpy().data)


def _header(tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> bytes:
    # without "format", transformers refuses the file
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **about}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {"dtype": NATIVE[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor in memory of its own, on the CPU. Raises safetensors.SafetensorError or OSError.

    Copied out of the mapped file: a mapping that outlives a truncation of its file ends the process.
    """
    with safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
