"""Tables and traces that are written, and names that are refused."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

import pytest

from flatout.errors import UsageError
from flatout.profiling.exports import check_table, check_trace, write_table, write_tensorboard, write_trace
from flatout.profiling.profile import OperatorRow, Profile, grouped, sorted_operators
from flatout.train.loggers import TensorBoardLog

ROWS = [
    OperatorRow(
        name=name,
        operator_class="matmul",
        shapes=shapes,
        dtype="float32",
        calls=calls,
        seconds=seconds,
        host_seconds=seconds,
        phase="forward",
        module="Net.fc",
        line=line,
        device="cpu",
        flops=flops,
        bytes=None,
    )
    for name, shapes, calls, seconds, line, flops in (
        ("aten::mm", "[8, 16] [16, 4]", 1, 0.25, "train.py:3", 1024.0),
        ("aten::mm", "[8, 16] [16, 8]", 2, 0.5, "train.py:9", None),
        ("=cmd()", "", 1, 0.125, "train.py:9", None),
    )
]


def test_a_table_as_csv(tmp_path: Path) -> None:
    write_table(tmp_path / "table.csv", ROWS)
    with open(tmp_path / "table.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == [one.name for one in fields(OperatorRow)]
    assert (found[0]["seconds"], found[0]["bytes"]) == ("0.25", "")
    assert found[2]["name"] == "'=cmd()"  # no formula for a spreadsheet


def test_a_table_as_json_and_as_text(tmp_path: Path) -> None:
    write_table(tmp_path / "table.json", ROWS)
    assert json.loads((tmp_path / "table.json").read_text())[0]["flops"] == 1024.0
    write_table(tmp_path / "table.txt", ROWS)
    assert "aten::mm  [8, 16] [16, 4]  float32  Net.fc  train.py:3" in (tmp_path / "table.txt").read_text()


@pytest.mark.parametrize("ending", ["csv", "json", "txt"])
def test_a_line_of_a_file_whose_name_is_no_utf8_is_written(ending: str, tmp_path: Path) -> None:
    write_table(tmp_path / f"table.{ending}", [replace(ROWS[0], line="caf\udce9.py:3")])
    assert "caf\\udce9.py:3" in (tmp_path / f"table.{ending}").read_text(encoding="utf-8")


def test_a_trace_is_compressed_where_its_name_says_so(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.json"
    recorded.write_text('{"traceEvents": []}')
    write_trace(recorded, tmp_path / "trace.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())) == {"traceEvents": []}
    write_trace(recorded, tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text() == recorded.read_text()


def test_a_name_may_be_an_ending_alone(tmp_path: Path) -> None:
    check_table(tmp_path / ".csv")
    write_table(tmp_path / ".csv", ROWS)
    assert (tmp_path / ".csv").read_text().startswith("name,")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write .*logs: .*; name another location, or free up space there"):
        write_tensorboard(tmp_path / "file" / "logs", None, cast(Profile, None), cast(TensorBoardLog, None))


@pytest.mark.parametrize("name", ["table.xls", "absent/table.csv", "table"])
def test_a_table_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        check_table(tmp_path / name)


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"its name ends with \.json, \.json\.gz"):
        check_trace(tmp_path / "trace.txt")
    check_trace(tmp_path / "trace.json.gz")


def test_rows_are_added_up_and_sorted() -> None:
    by_name = {row.name: row for row in grouped(ROWS, "name")}
    assert (by_name["aten::mm"].seconds, by_name["aten::mm"].calls, by_name["aten::mm"].flops) == (0.75, 3, 1024.0)
    assert (by_name["aten::mm"].shapes, by_name["aten::mm"].line) == ("", "")
    assert len(grouped(ROWS, "shape")) == 3
    by_line = {row.line: row.seconds for row in grouped(ROWS, "line")}
    assert by_line == {"train.py:3": 0.25, "train.py:9": 0.625}
    assert [row.calls for row in sorted_operators(ROWS, "calls")] == [2, 1, 1]
    assert sorted_operators(ROWS, "flops")[0].flops == 1024.0
