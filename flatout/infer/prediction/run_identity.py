"""What the results of a run are of: those of other weights, code or inputs must not be mixed with them."""

from __future__ import annotations

import hashlib
import inspect
import io
from pathlib import Path

import torch
from torch import Tensor, nn

from flatout.checkpoint.disk import sha256_of
from flatout.plan import Plan
from flatout.tensor_bytes import bytes_view

DIGEST_CHARACTERS = 16


def run_identity(
    spec: str, model: nn.Module, inputs: Path, plan: Plan, *, tokenizer: str | None, keep: str, check_finite: bool
) -> dict[str, object]:
    """In values that JSON knows. spec: what names the model on the command line; model: as it was loaded.

    A model that is made with new random weights each time is another one each time.
    """
    return {
        "model": spec,
        "weights_digest": weights_digest(model),
        "code_digest": _code_digest(spec, model),
        "inputs": str(inputs.resolve()),
        "inputs_digest": sha256_of(inputs)[:DIGEST_CHARACTERS],
        "tokenizer": tokenizer,
        "plan": plan.choices(),
        "keep": keep,
        "check_finite": check_finite,
    }


def _code_digest(spec: str, model: nn.Module) -> str | None:
    """Of the file that `spec` names, the settings in a folder, or the file of the model's class; None: unknown."""
    source = Path(spec.rpartition(":")[0])
    try:
        files = [source] if source.suffix == ".py" else [Path(inspect.getfile(type(model)))]
        files = sorted(Path(spec).glob("*.json")) if Path(spec).is_dir() else files
        digests = [sha256_of(file) for file in files]
    except (OSError, TypeError):  # a class without a file, or in an archive
        return None
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:DIGEST_CHARACTERS]


def weights_digest(model: nn.Module) -> str:
    """Of parameters and buffers, with their names, shapes and dtypes."""
    found = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.update(f"{name} {list(tensor.shape)} {tensor.dtype} ".encode())
        found.update(_bytes_of(tensor.detach()))
    return found.hexdigest()[:DIGEST_CHARACTERS]


def _bytes_of(tensor: Tensor) -> bytes:
    if tensor.is_meta or not tensor.numel():
        return b""
    try:
        return bytes_view(tensor).numpy().tobytes()
    except (RuntimeError, NotImplementedError, TypeError):  # a tensor class that has no bytes of its own
        whole = io.BytesIO()
        torch.save(tensor, whole)
        return whole.getvalue()
