"""The measured ceilings, kept in one file a machine, device and torch version.

`flatout run` reads them at every start, so the code that measures them is elsewhere and not imported here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from flatout import environment
from flatout.errors import MachineError
from flatout.machine.ceilings import Ceilings
from flatout.machine.description import Machine
from flatout.whole_files import written_whole

SCHEMA = 1
"""Of the file; one with a higher number was written by a newer Flatout, and is left as it is."""


def load_ceilings(machine: Machine, device: str | None = None) -> Ceilings | None:
    """What was measured before of that device ('cpu', 'cuda:0'; None: where work should run here) with this torch.

    None if nothing was, or the file is damaged or from a newer Flatout: another device's ceilings say nothing about
    this one.
    """
    device = device or machine.device_name
    try:
        schema, document = _read(_cache_file(machine, device))
        if schema > SCHEMA:
            return None
        found = Ceilings.from_json(document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, not JSON, or of another shape
        return None
    return found if found.device == device else None


def save_ceilings(machine: Machine, ceilings: Ceilings) -> Path:
    """Keep them for next time; a reader sees the old file or the new one, never half of one.

    Ceilings measured on a busy machine, or with fewer threads, are too low: they only raise what was kept before.
    """
    path, before = _cache_file(machine, ceilings.device), load_ceilings(machine, ceilings.device)
    _refuse_newer(path)
    if before is not None and (ceilings.contended or ceilings.threads < before.threads):
        ceilings = before.raised_by(ceilings)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as temporary:
            temporary.write_text(json.dumps({"schema": SCHEMA, **ceilings.to_json()}, indent=1), encoding="utf-8")
    except OSError as error:
        raise MachineError(
            f"cannot keep the ceilings in {path.parent}: {error.strerror}",
            remedy="name another folder in FLATOUT_CACHE_DIR",
        ) from error
    return path


def _read(path: Path) -> tuple[int, Mapping[str, object]]:
    """(schema, ceilings); the first files of schema 1 do not name it. Raises what a damaged file does."""
    document = {"schema": 1, **json.loads(path.read_text())}
    return int(document.pop("schema")), document


def _refuse_newer(path: Path) -> None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        if (schema := _read(path)[0]) > SCHEMA:
            raise MachineError(
                f"the ceilings are not kept: {path} was written by a newer Flatout (schema {schema}; "
                f"this one reads {SCHEMA})",
                remedy="upgrade Flatout, or delete that file",
            )


def _cache_file(machine: Machine, device: str) -> Path:
    name = f"{machine.fingerprint}-{device.replace(':', '-')}-torch-{machine.versions.torch}.json"
    return environment.cache_dir() / "ceilings" / name
