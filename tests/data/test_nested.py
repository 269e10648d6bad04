"""Batches in any shape: mapped, measured, sliced, moved."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatout.data.nested import (
    batch_length,
    map_leaves,
    map_tensors,
    moves_itself,
    repeat_batch,
    slice_batch,
    split_batch,
    tensors_in,
    to_device,
)
from flatout.data.prefetch import _map_plain
from flatout.errors import UsageError
from tests.odd_defaults import odd_defaults

Point = namedtuple("Point", "x y")


@dataclass
class Sample:
    x: Any
    names: Any = None


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
NESTS = [X, (X, Y), [X, Y], {"x": X, "y": {"z": Y}}, Point(X, Y), Sample(X, ["a"] * 6), OrderedDict(x=X), UserDict(x=X)]


@pytest.mark.parametrize("nest", NESTS, ids=lambda nest: type(nest).__name__)
def test_parts_put_together_are_the_whole(nest: Any) -> None:
    assert batch_length(nest) == 6
    parts = split_batch(nest, 4)
    assert [batch_length(part) for part in parts] == [1, 2, 1, 2]
    assert all(type(part) is type(nest) for part in parts)
    for i, (path, tensor) in enumerate(tensors_in(nest)):
        found = [list(tensors_in(part))[i] for part in parts]
        assert {name for name, _ in found} == {path}
        assert torch.equal(torch.cat([t for _, t in found]), tensor)
    assert len(split_batch(nest, 100)) == 6
    assert split_batch(nest, 1)[0] is nest


def test_what_is_not_per_sample_stays() -> None:
    part = slice_batch((X, torch.tensor(3.0), "text", None, ["a", "b"]), 1, 3)
    assert part[0].shape == (2, 2)
    assert (part[1].item(), part[2:]) == (3.0, ("text", None, ["a", "b"]))
    assert slice_batch(Sample(X, list("abcdef")), 1, 3).names == ["b", "c"]
    assert slice_batch((X, list("abcdef")), 1, 3)[1] == ["b", "c"]


def test_a_move_keeps_the_nest_and_the_original() -> None:
    moved = to_device({"x": (X, 1)}, "meta")
    assert moved["x"][0].device.type == "meta"
    assert moved["x"][1] == 1
    assert X.device.type == "cpu"
    assert to_device(X, "cpu") is X
    doubled = map_tensors(lambda t: t * 2, Sample(X))
    assert torch.equal(doubled.x, X * 2)


@pytest.mark.parametrize(
    ("batch", "said"),
    [("text", "without a tensor"), ((X, torch.zeros(4)), r"batch\[0\] has 6, batch\[1\] has 4")],
)
def test_a_batch_without_one_length_is_refused(batch: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        batch_length(batch)


def test_a_packed_sequence_moves_as_one() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    moved = to_device((packed, {"y": torch.zeros(2)}), "cpu")[0]
    assert type(moved) is type(packed)
    assert (moved.data.device.type, moved.batch_sizes.tolist()) == ("cpu", [2, 1, 1])
    meta = map_leaves(lambda leaf: leaf.to("meta"), packed, moves_itself)
    assert (meta.data.device.type, meta.batch_sizes.device.type) == ("meta", "cpu")


class Opaque:
    """A batch that knows how to move, as graphs and boxes have it."""

    where = "cpu"

    def to(self, device: Any) -> Opaque:
        moved = type(self)()
        moved.where = str(device)
        return moved


class InPlace(Opaque):
    def to(self, device: Any) -> None:  # type: ignore[override]
        self.where = str(device)


class Encoding(UserDict[str, Any]):
    """As that of a tokenizer, whose `to` changes itself."""

    def to(self, device: Any) -> Encoding:
        raise AssertionError("the original would be changed")


def test_objects_that_move_themselves_do() -> None:
    moved = to_device([Opaque(), {"boxes": InPlace()}, Encoding(x=X)], "meta")
    assert (moved[0].where, moved[1]["boxes"].where) == ("meta", "meta")
    assert type(moved[2]) is Encoding
    assert moved[2]["x"].is_meta
    kept = Opaque()
    doubled = _map_plain(lambda tensor: tensor * 2, [X, kept])  # what runs ahead is only what the allocator knows of
    assert torch.equal(doubled[0], 2 * X)
    assert doubled[1] is kept


def test_entries_of_samples_go_with_their_samples() -> None:
    """Left whole, the second part would get the first samples' spans."""
    spans: list[object] = [[1], [], [2, 3], [4], [5], [6, 7]]
    batch = {"x": X, "spans": spans, "weights": np.arange(6), "boxes": [{"n": i} for i in range(6)], "size": [4, 4]}
    first, second = split_batch(batch, 2)
    assert (first["spans"], second["spans"]) == (spans[:3], spans[3:])
    assert second["boxes"] == [{"n": 3}, {"n": 4}, {"n": 5}]
    assert second["weights"].tolist() == [3, 4, 5]
    assert second["size"] == [4, 4]
    more = repeat_batch(batch, 8)
    assert more["spans"] == [*spans, [1], []]
    assert more["weights"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert more["boxes"][7] == {"n": 1}


PACKED = nn.utils.rnn.pack_sequence([torch.arange(24.0).reshape(6, 4)])
RAGGED = torch.nested.nested_tensor([torch.ones(n, 2) for n in range(1, 7)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (PACKED, "batch is a PackedSequence; its samples lie side by side"),  # of one sequence: sizes do not differ
        ((X, Opaque()), r"batch\[1\] is an Opaque; which of its contents belong to which sample"),
        ({"edges": torch.eye(6).to_sparse(), "x": X}, r"batch\['edges'\] is a tensor of layout sparse_coo"),
        (Sample(X, RAGGED), "batch.names is a tensor of layout nested"),
    ],
)
def test_what_cannot_be_split_is_refused(batch: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        split_batch(batch, 2)


def test_sizes_that_differ_are_named_before_more_that_do_not() -> None:
    x = torch.ones(6, 2)
    graph = {"adjacency": x, "x": x, "y": x, "mask": x, "edges": torch.ones(2, 30)}
    with pytest.raises(UsageError, match=r"first size: batch\['adjacency'\] has 6, batch\['edges'\] has 2;"):
        batch_length(graph)


def test_samples_are_repeated_whatever_the_default_device_is() -> None:
    with odd_defaults():
        repeated = repeat_batch(torch.arange(3, device="cpu"), 5)
    assert repeated.tolist() == [0, 1, 2, 0, 1]
