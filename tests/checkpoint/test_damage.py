"""Every changed byte is noticed, the checkpoint before is used, and nothing in a file is ever executed."""

from __future__ import annotations

import ast
import hashlib
import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.restoring import restore
from flatout.checkpoint.saved import open_checkpoint
from flatout.errors import UsageError

ROOM = Path(__file__).parents[2] / "flatout" / "checkpoint"
FILES = ["model.safetensors", "optimizer.safetensors", "state.safetensors", "state.json", "manifest.json"]


@pytest.fixture
def two(tmp_path: Path) -> Checkpoints:
    """Steps 1 and 2."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        torch.rand(1)
        random.random()
        checkpoints.save(capture(model=model, optimizer=optimizer), step=step)
    return checkpoints


def newest(checkpoints: Checkpoints) -> Path:
    (path,) = checkpoints.folder.glob("*-step-2")
    return path


def loads_step_1(checkpoints: Checkpoints, told: str) -> None:
    with pytest.warns(UserWarning, match=told):
        loaded = checkpoints.load()
    assert loaded is not None
    assert loaded.step == 1
    assert len(loaded.notes) == 1
    assert told in loaded.notes[0]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0, 1, 8, 0.3, 0.7, -1])
def test_a_flipped_bit(two: Checkpoints, name: str, place: float) -> None:
    path = newest(two) / name
    content = bytearray(path.read_bytes())
    content[int(place * len(content)) if isinstance(place, float) else place] ^= 1 << random.randrange(8)
    path.write_bytes(content)
    loads_step_1(two, f"{name} is damaged")


def test_every_bit_of_the_manifest_counts(two: Checkpoints) -> None:
    path = newest(two) / "manifest.json"
    content = path.read_bytes()
    for index in range(len(content)):
        path.write_bytes(content[:index] + bytes([content[index] ^ 1 << index % 8]) + content[index + 1 :])
        with pytest.raises(UsageError, match="damaged"):
            open_checkpoint(path.parent)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_an_empty_and_a_longer_file(two: Checkpoints, name: str) -> None:
    path = newest(two) / name
    content = path.read_bytes()
    for broken in (content[:-1], content[: len(content) // 2], b"", content + b"\0"):
        path.write_bytes(broken)
        loads_step_1(two, f"{name} is damaged")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(two: Checkpoints, name: str) -> None:
    (newest(two) / name).unlink()
    loads_step_1(two, name)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_checkpoint(two: Checkpoints, name: str) -> None:
    (other,) = two.folder.glob("*-step-1")
    shutil.copy(other / name, newest(two) / name)
    loads_step_1(two, "damaged")


def test_a_folder_renamed_to_another_step(two: Checkpoints) -> None:
    newest(two).rename(two.folder / "000002-step-3")
    loads_step_1(two, "it holds step 2")


def test_if_none_is_whole_it_does_not_start_anew(two: Checkpoints) -> None:
    for path in two.folder.glob("*/state.json"):
        path.write_bytes(b"{}")
    with pytest.raises(UsageError, match=r"no checkpoint in .* is whole: .*step-2 was skipped: .*step-1 was"):
        two.load()


def test_latest_and_at_pass_over_what_is_seen_to_be_damaged(two: Checkpoints) -> None:
    (newest(two) / "state.json").unlink()
    latest = two.latest()
    assert latest is not None
    assert latest.step == 1
    with pytest.raises(UsageError, match="the steps there are: 1"):
        two.at(2)


def test_damaged_ones_do_not_count_among_the_last(two: Checkpoints) -> None:
    (newest(two) / "state.json").unlink()
    fresh = Checkpoints(two.folder, keep_last=2)
    fresh.save({"extra": 3}, step=3)
    assert sorted(path.name for path in two.folder.iterdir()) == ["000001-step-1", "000003-step-3"]


def forge(folder: Path, change: dict[str, Any]) -> None:
    """A manifest with other content and a right checksum, as a newer Flatout or an attacker would write it."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text()) | change
    del document["sha256"]
    body = json.dumps(document, indent=1).removesuffix("\n}") + ",\n"
    path.write_text(f'{body} "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n')


def test_a_newer_schema_is_not_taken_for_damage(two: Checkpoints) -> None:
    forge(newest(two), {"flatout": {"document": "checkpoint", "schema": 3, "version": "9.1"}, "files": "elsewhere"})
    for ask in (two.load, two.latest, lambda: two.at(2)):
        with pytest.raises(UsageError, match=r"by Flatout 9\.1, schema 3; this is .* up to schema 2; update Flatout"):
            ask()
    Checkpoints(two.folder, keep_last=1).save({"extra": 1}, step=3)
    assert newest(two).exists()


@pytest.mark.parametrize("name", ["../000001-step-1/state.json", "/etc/passwd", ".."])
def test_a_manifest_cannot_point_outside(two: Checkpoints, name: str) -> None:
    forge(newest(two), {"files": {name: {"size_bytes": 1, "sha256": ""}}})
    loads_step_1(two, "manifest.json is damaged")


class Malicious:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('executed')",))


@pytest.mark.parametrize("name", FILES)
def test_a_malicious_file_with_the_right_checksum_is_not_executed(two: Checkpoints, name: str) -> None:
    content = pickle.dumps(Malicious())
    (newest(two) / name).write_bytes(content)
    if name != "manifest.json":
        files = json.loads((newest(two) / "manifest.json").read_text())["files"]
        files[name] = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        forge(newest(two), {"files": files})
    loads_step_1(two, f"{name} is damaged")


@pytest.mark.parametrize(
    "node",
    [
        {"tensor": {"file": "state", "name": "nowhere"}},
        {"tensor": {"file": "model", "name": "weight", "dtype": "float32", "shape": [99], "stride": [1]}},
        {
            "tensor": {
                "file": "model",
                "name": "weight",
                "dtype": "float32",
                "shape": [99],
                "stride": [1],
                "offset_bytes": 0,
            }
        },
        {"tensor": {"file": "model", "name": "weight", "dtype": "load", "shape": [], "stride": [], "offset_bytes": 0}},
        {"run": "code"},
        {"a": 1, "b": 2},
        {"bytes": "?"},
        {"dtype": "nothing"},
        {"size": "no"},
        {"device": "abacus"},
        {"set": [[1]]},
        {"tensor": {"file": "model", "name": "weight", "stride": [-1, 2]}},
        {"scalar": ["O", "AAAAAAAAAAA="]},
    ],
    ids=str,
)
def test_a_forged_structure_is_damage(two: Checkpoints, node: Any) -> None:
    content = json.dumps({"extra": node}).encode()
    (newest(two) / "state.json").write_bytes(content)
    files = json.loads((newest(two) / "manifest.json").read_text())["files"]
    files["state.json"] = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge(newest(two), {"files": files})
    loads_step_1(two, "state.json is damaged")


def test_restoring_from_a_damaged_checkpoint_changes_nothing(two: Checkpoints) -> None:
    checkpoint = two.at(2)
    path = checkpoint.folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    model = torch.nn.Linear(3, 2)
    before = model.weight.detach().clone()
    with pytest.raises(UsageError, match=r"optimizer.safetensors is damaged"):
        restore(checkpoint, model=model)
    assert torch.equal(model.weight, before)


def test_no_pickle_in_the_room() -> None:
    assert len(list(ROOM.glob("*.py"))) > 5
    for path in ROOM.glob("*.py"):
        text = path.read_text()
        words = [one for one in ("pickle", "torch.load(", "torch.save(", "eval(", "exec(") if one in text]
        assert words == [], path
        imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not any("pickle" in ast.unparse(node) or "marshal" in ast.unparse(node) for node in imported)
