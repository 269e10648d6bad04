import errno
import json
import os
from pathlib import Path

import pytest

from flatout import __version__
from flatout.errors import UsageError
from flatout.report.document import document, read_document, report_place, to_text, write_document


def test_a_document_is_written_whole_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    doc = document("run", {"x": [1, "ü"]})
    write_document(path, doc)
    write_document(path, doc)
    assert read_document(path, "run") == doc
    assert doc["flatout"] == {"document": "run", "schema": 1, "version": __version__}
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_the_old_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_document(path, document("run", {"x": 1}))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"cannot write .*run\.json: No space left on device"):
        write_document(path, document("run", {"x": 2}))
    assert read_document(path)["x"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        write_document(tmp_path / "absent" / "x.json", {})


def test_a_place_for_a_report_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert report_place("run.json") == tmp_path / "run.json"
    for place, why in (
        (".", f"{tmp_path} is a folder"),
        ("absent/run.json", f"there is no folder {tmp_path}/absent"),
        ("file/run.json", f"there is no folder {tmp_path}/file"),
    ):
        with pytest.raises(UsageError, match=rf"cannot write /.*; {why}; name a file in a folder that can be written"):
            report_place(place)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) == os.devnull)  # its folder is root's
    assert report_place(os.devnull) == Path(os.devnull)
    with pytest.raises(UsageError, match="cannot write"):
        report_place("run.json")


def test_a_nan_is_the_writers_defect() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_text(document("run", {"x": float("nan")}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a JSON document"),
        (b"\xff\xfe", "not a JSON document"),
        (b"[1]", "not a document of Flatout's"),
        (b'{"a": 1}', "not a document of Flatout's"),
        (b'{"flatout": {"schema": "1"}}', "not a document of Flatout's"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"flatout": {"schema": 99, "version": "9.9"}}', "written by Flatout 9.9, schema 99"),
        (b'{"flatout": {"schema": 99, "version": "\\u001b[2J"}}', r"written by Flatout \\x1b\[2J, schema 99"),
        (b'{"flatout": {"schema": 1, "document": "check"}}', "is a 'check' document; a 'run' is needed"),
    ],
)
def test_what_is_no_such_document_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_document(path, "run")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_document(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="Is a directory"):
        read_document(tmp_path)


def test_documents_are_plain_json() -> None:
    assert json.loads(to_text(document("x", {"y": 1})))["y"] == 1


def test_a_name_that_is_not_utf_8_is_written_and_read_back(tmp_path: Path) -> None:
    path, name = tmp_path / "run.json", os.fsdecode(b"caf\xe9.py")
    write_document(path, document("run", {"script": name}))
    assert read_document(path)["script"] == name
    assert "caf\\udce9.py" in path.read_text()
