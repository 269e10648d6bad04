"""A profile's tables as CSV, JSON and text; traces where TensorBoard looks for them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from flatout.errors import UsageError
from flatout.profiling.profile import OperatorRow, Profile
from flatout.train.loggers import TensorBoardLog
from flatout.whole_files import PRIVATE, errors_named, write_obstacle, written_whole

TABLES = (".csv", ".json", ".txt")
TRACES = (".json", ".json.gz")
ELSEWHERE = "name another location, or free up space there"
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet would compute a cell that starts like this; names are the script's."""


def check_table(path: Path) -> None:
    """UsageError for a name that says no format, or a place that cannot be written."""
    _check(path, TABLES, "an operator table")


def check_trace(path: Path) -> None:
    _check(path, TRACES, "a trace")


def _check(path: Path, endings: Sequence[str], what: str) -> None:
    if not path.name.endswith(tuple(endings)):
        raise UsageError(f"cannot write {what} to {path}", limit=f"its name ends with {', '.join(endings)}")
    if why := write_obstacle(path):
        raise UsageError(f"cannot write {path}", limit=why, remedy="name a file in a folder that can be written")


def write_table(path: Path, rows: Sequence[OperatorRow]) -> None:
    """The format by the name's ending."""
    made = {".csv": _csv, ".json": _json, ".txt": _text}
    text = next(make for ending, make in made.items() if path.name.endswith(ending))(rows)
    with errors_named(path, ELSEWHERE), written_whole(path, mode=PRIVATE) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # a file's name may be no UTF-8


def _csv(rows: Sequence[OperatorRow]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, [one.name for one in fields(OperatorRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in vars(row).items()} for row in rows)
    return out.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, str) and value.startswith(_FORMULA):
        return "'" + value
    return "" if value is None else value


def _json(rows: Sequence[OperatorRow]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _text(rows: Sequence[OperatorRow]) -> str:
    lines = [f"{'seconds':>12} {'calls':>10} {'FLOP':>12} {'bytes':>12}  {'phase':<13} operator"]
    for row in rows:
        flops = "" if row.flops is None else f"{row.flops:.4g}"
        size = "" if row.bytes is None else f"{row.bytes:.4g}"
        where = "  ".join(part for part in (row.name, row.shapes, row.dtype, row.module, row.line) if part)
        lines.append(f"{row.seconds:12.6g} {row.calls:10.4g} {flops:>12} {size:>12}  {row.phase:<13} {where}")
    return "\n".join(lines) + "\n"


def write_trace(recorded: Path, path: Path) -> None:
    """Copy a trace (plain JSON) to where it was asked for; compressed where the name ends with .gz."""
    with errors_named(path, ELSEWHERE), written_whole(path, mode=PRIVATE) as temporary:
        if path.name.endswith(".gz"):
            with open(recorded, "rb") as source, gzip.open(temporary, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target)
        else:
            shutil.copyfile(recorded, temporary)


def write_tensorboard(folder: Path, recorded: Path | None, profile: Profile, log: TensorBoardLog) -> None:
    """A trace under the name that TensorBoard's profile plugin looks for, and scalars into the log of that folder."""
    with errors_named(folder, ELSEWHERE):
        folder.mkdir(parents=True, exist_ok=True)
        if recorded is not None:
            write_trace(recorded, folder / f"flatout.{time.time_ns() // 1_000_000}.pt.trace.json.gz")
        log.log({f"profile/{name}": value for name, value in scalars(profile).items()}, 0)
        log.close()


def scalars(profile: Profile) -> dict[str, float]:
    """What is known of: seconds a step and of each part, rates."""
    parts = profile.parts.to_json() if profile.parts is not None else {}
    known = {
        "step_seconds": profile.step_seconds,
        "samples_per_second": profile.samples_per_second,
        "tokens_per_second": profile.tokens_per_second,
        "flops_per_step": profile.flops,
        **{f"{name}_seconds": seconds for name, seconds in parts.items()},
    }
    return {name: value for name, value in known.items() if value is not None}
