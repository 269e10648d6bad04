"""Worker processes: data sets that they cannot share, and loops within loops."""

from __future__ import annotations

import io
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from flatout.data.batches import batches, whole_epoch
from flatout.plan import Plan


class Holding(Dataset[Any]):
    """Holds something; its samples take a while."""

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


def test_a_data_set_with_an_open_file_stays_in_this_process(tmp_path: Path) -> None:
    path = tmp_path / "samples.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    np.savez(tmp_path / "arrays.npz", a=np.zeros(2))
    with path.open("rb") as file, zipfile.ZipFile(path) as archive, np.load(tmp_path / "arrays.npz") as arrays:
        for held in (file, archive, arrays, [file], {"a": archive}):
            for data in (Holding(held), Subset(Holding(held), range(30)), ConcatDataset([Holding(), Holding(held)])):
                count, why = batches(data, 4).workers
                assert (count, "Holding.held is open: workers would share it" in why) == (0, True)
            assert batches(Holding(held), 4, Plan(loader_workers=1)).workers[0] == 1  # as the plan says
    with (tmp_path / "log").open("w") as log:
        for held in (file, io.BytesIO(b"a"), sys.stderr, log, 3, [torch.ones(2)], {"a": [file]}):
            assert "is open" not in batches(Holding(held), 4).workers[1]


def test_a_data_set_that_holds_itself_is_looked_through_once(tmp_path: Path) -> None:
    data: Any = Holding()
    data.dataset = data
    with (tmp_path / "a").open("w+") as data.file:
        assert "Holding.file is open" in batches(data, 4).workers[1]


def test_samples_of_an_open_file_are_those_of_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Read(Holding):
        def __getitem__(self, index: int) -> Any:
            self.held.seek(8 * index)
            time.sleep(0.004)
            return torch.tensor(int(np.frombuffer(self.held.read(8), np.int64)[0]))

    monkeypatch.setattr("flatout.data.batches.usable_cores", lambda: 3)
    np.arange(40).tofile(tmp_path / "a")
    with (tmp_path / "a").open("rb", buffering=0) as file:
        source = batches(Read(file), 1)
        assert sorted(int(one) for batch in source for one in batch) == list(range(40))
    assert source.workers[0] == 0


@pytest.mark.parametrize("until", [1, 40])
def test_a_loop_within_a_loop_of_workers_that_persist(until: int) -> None:
    source = batches(Holding(), 2, Plan(loader_workers=2, persistent_workers=True))
    found = next(iter(source)).tolist()  # the loop begins within the epoch, and the one in it at the beginning
    for batch in source:
        found += batch.tolist()
        if len(found) == 4:
            with whole_epoch(source):
                inner: list[int] = []
                for part in source:
                    inner += part.tolist()
                    if len(inner) >= until:
                        break
            assert len(set(inner)) == max(until, 2)
    assert sorted(found) == list(range(40))
