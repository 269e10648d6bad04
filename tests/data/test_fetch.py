"""Whole batches are the loader's own, to the bit; where they cannot be, the loader goes on as it did."""

from __future__ import annotations

import gc
import importlib
import random
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

import flatout
from flatout.data.fetch import batched_fetch, obstacle_to_batching, same_bits
from tests.data.kept_data_sets import DATA_SETS, LEFT_ALONE, Counting, Labelled, Shared

PACKAGE = Path(flatout.__file__).parent


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(6.0))


class Listed(torch.utils.data.Sampler):  # type: ignore[type-arg]
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def tensors(count: int = 11) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3), torch.arange(count))


def epochs_of(dataset: Any, count: int = 2) -> list[Any]:
    torch.manual_seed(3)
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    found = [batch for _ in range(count) for batch in loader]
    return [*found, torch.rand(2)]  # and where the generator stands afterwards


@pytest.mark.parametrize("name", DATA_SETS)
def test_batches_are_the_loaders_own(name: str) -> None:
    dataset, told = DATA_SETS[name](), list[str]()
    assert obstacle_to_batching(dataset, default_collate) == ""
    plain = epochs_of(dataset)
    with batched_fetch(on_mismatch=told.append):
        assert same_bits(epochs_of(dataset), plain)
    assert told == []


@pytest.mark.parametrize("name", DATA_SETS)
def test_no_sample_is_fetched_alone_after_the_first_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, own, calls = DATA_SETS[name](), _MapDatasetFetcher.fetch, list[Any]()

    def fetch(fetcher: Any, wanted: Any) -> Any:
        calls.append(wanted)
        return own(fetcher, wanted)

    monkeypatch.setattr(_MapDatasetFetcher, "fetch", fetch)
    with batched_fetch():
        epochs_of(dataset, 1)
        of_the_first_epoch = len(calls)
        epochs_of(dataset, 1)
    assert 0 < of_the_first_epoch == len(calls)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone_without_a_call_of_it(name: str) -> None:
    make, why = LEFT_ALONE[name]
    dataset = make()
    obstacle = obstacle_to_batching(dataset, default_collate)
    assert obstacle
    assert why in obstacle
    if isinstance(dataset, Counting):
        assert dataset.calls == 0


@pytest.mark.parametrize("name", [name for name in LEFT_ALONE if name != "empty"])
def test_the_script_s_own_code_runs_as_often_as_it_would(name: str) -> None:
    make, _ = LEFT_ALONE[name]

    def run() -> list[Any]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        dataset = make()
        found = epochs_of(dataset)
        kept = {key: value for key, value in vars(dataset).items() if isinstance(value, (int, list, torch.Tensor))}
        return [*found, kept, random.random(), np.random.rand()]

    plain = run()
    with batched_fetch():
        assert same_bits(run(), plain)


@pytest.mark.parametrize("batches", [[[0, 3], [5]], [torch.tensor([1, 2])], [(4, -1)], [np.array([1, 9])], [[True, 0]]])
@pytest.mark.parametrize("name", ["tensors", "row of each", "subset of subset", "subset by array", "subset by tensor"])
def test_any_batch_sampler(batches: Any, name: str) -> None:
    dataset = DATA_SETS[name]()
    loader = DataLoader(dataset, batch_sampler=Listed(batches * 2))
    try:
        plain: Any = list(loader)
    except (IndexError, RuntimeError, TypeError) as error:
        plain = type(error)
    with batched_fetch():
        if isinstance(plain, list):
            assert same_bits(list(loader), plain)
        else:
            with pytest.raises(plain):
                list(loader)


def test_out_of_range_stays_the_users_own_error() -> None:
    with batched_fetch(), pytest.raises(IndexError, match="index 99 is out of bounds"):
        list(DataLoader(tensors(), batch_sampler=Listed([[0], [99]])))


def test_streams_lists_and_own_collate_functions_are_not_for_it() -> None:
    for dataset, collate, why in (
        (tensors(), lambda samples: samples, "collate"),
        (Stream(), default_collate, "stream"),
        ([1, 2, 3], default_collate, "stream"),
    ):
        assert why in obstacle_to_batching(dataset, collate)
        with batched_fetch():
            list(DataLoader(dataset, batch_size=2, collate_fn=collate))  # type: ignore[arg-type]


def test_another_loader_of_the_same_data_keeps_its_collate_function() -> None:
    dataset = tensors(4)
    with batched_fetch():
        list(DataLoader(dataset, batch_size=2))
        assert next(iter(DataLoader(dataset, batch_size=2, collate_fn=len))) == 2


def test_a_batch_that_the_script_changes_changes_nothing_else() -> None:
    dataset = DATA_SETS["the same twice"]()
    with batched_fetch():
        for _ in range(3):
            for first, second in DataLoader(dataset, batch_size=11):
                assert torch.equal(first, second)
                first.zero_()
                assert second.any()


def test_a_data_set_that_is_gone_is_not_held() -> None:
    with batched_fetch():
        dataset = tensors(4)
        list(DataLoader(dataset, batch_size=2))
        finder = __import__("weakref").ref(dataset)
        del dataset
        gc.collect()
        assert finder() is None


def test_undone_and_what_was_put_around_it_stays() -> None:
    before = _MapDatasetFetcher.fetch
    with batched_fetch():
        assert _MapDatasetFetcher.fetch is not before
    assert _MapDatasetFetcher.fetch is before

    with batched_fetch():
        ours = _MapDatasetFetcher.fetch

        def counted(fetcher: Any, wanted: Any) -> Any:
            return ours(fetcher, wanted)

        _MapDatasetFetcher.fetch = counted  # type: ignore[method-assign]
    assert _MapDatasetFetcher.fetch is counted
    assert len(list(DataLoader(tensors(), batch_size=4))) == 3
    _MapDatasetFetcher.fetch = before  # type: ignore[method-assign]


def test_strides_are_those_of_stacking() -> None:
    """Whatever lies behind a sample: stacking gives rows that follow each other, and so do we."""
    draw = random.Random(0)
    for _ in range(60):
        sizes = [draw.choice((1, 2, 3)) for _ in range(draw.randint(1, 4))]
        stored = torch.randn(5, *sizes).permute(0, *draw.sample(range(1, len(sizes) + 1), len(sizes)))
        if draw.random() < 0.3:
            stored = stored[:, ::2]
        dataset = TensorDataset(stored)
        loader = DataLoader(dataset, batch_size=draw.choice((1, 2, 5)))
        plain, told = list(loader), list[str]()
        with batched_fetch(on_mismatch=told.append):
            assert same_bits([list(loader), list(loader)], [plain, plain])
        assert told == []


# What a script may do to its data between two batches or two epochs.


def _permute(data: Any, draw: random.Random) -> None:
    if isinstance(data.subset.indices, list):
        draw.shuffle(data.subset.indices)


def _refill(data: Any, draw: random.Random) -> None:
    if isinstance(data.subset.indices, list):
        data.subset.indices[:] = [draw.randrange(40) for _ in range(len(data.subset.indices))]


def _other_indices(data: Any, draw: random.Random) -> None:
    made = [draw.randrange(40) for _ in range(20)]
    data.subset.indices = draw.choice([made, np.array(made), torch.tensor(made), tuple(made), range(5, 25)])


def _write_in_place(data: Any, draw: random.Random) -> None:
    data.x[draw.randrange(40)] += 1


def _write_past_the_version_counter(data: Any, draw: random.Random) -> None:
    data.x.data[draw.randrange(40)] = draw.random()


def _write_through_numpy(data: Any, draw: random.Random) -> None:
    data.array[draw.randrange(40)] *= 0.5


def _relabel(data: Any, draw: random.Random) -> None:
    data.labels[draw.randrange(40)] = draw.randrange(9)


def _other_tensor(data: Any, draw: random.Random) -> None:
    data.whole.tensors = (torch.randn(40, 3), data.whole.tensors[1])


def _other_type(data: Any, draw: random.Random) -> None:
    data.labelled.x = data.labelled.x.double() if draw.random() < 0.5 else data.labelled.x.float()


def _attribute(data: Any, draw: random.Random) -> None:
    data.labelled.scale = draw.choice([0.5, 2, 3])


def _transform(data: Any, draw: random.Random) -> None:
    data.labelled.transform = draw.choice([None, lambda x: x + torch.rand(()), lambda x: x * 2])


def _other_code(data: Any, draw: random.Random) -> None:
    data.labelled.__class__ = draw.choice([Labelled, Augmented])


class Augmented(Labelled):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.rand(3, dtype=x.dtype), y


CHANGES = [
    *(_permute, _refill, _other_indices, _write_in_place, _write_past_the_version_counter, _write_through_numpy),
    *(_relabel, _other_tensor, _other_type, _attribute, _transform, _other_code),
]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_script_changes_is_seen_at_the_next_batch(seed: int) -> None:
    def run() -> list[Any]:
        draw, data, found = random.Random(seed), Shared(), list[Any]()
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        chosen = draw.sample(CHANGES, 4)
        sets: list[Any] = [data.whole, data.subset, data.labelled, Subset(data.labelled, list(range(10)))]
        for _ in range(3):
            for dataset in sets:
                for batch in DataLoader(dataset, batch_size=draw.choice((3, 8)), shuffle=draw.random() < 0.5):
                    found.append(batch)
                    if draw.random() < 0.3:
                        draw.choice(chosen)(data, draw)
            draw.choice(chosen)(data, draw)
        return [*found, torch.rand(2), np.random.rand(), random.random()]

    plain, told = run(), list[str]()
    with batched_fetch(on_mismatch=told.append):
        assert same_bits(run(), plain)
    assert told == []


def test_a_replay_buffer_is_read_as_it_is() -> None:
    def run() -> list[Any]:
        torch.manual_seed(0)
        data = DATA_SETS["replay buffer"]()
        found = []
        for step, batch in enumerate(DataLoader(data, batch_size=4)):
            found.append(batch)
            data.data[(step * 4 + 5) % len(data)] = 100.0 + step
        return found

    plain = run()
    with batched_fetch():
        assert same_bits(run(), plain)


class Kept(Dataset):  # type: ignore[type-arg]
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2)


def test_code_that_was_replaced_is_run() -> None:
    data = DATA_SETS["row of each"]()
    kind = type(data)
    before = kind.__getitem__
    try:
        with batched_fetch():
            for _ in range(2):
                list(DataLoader(data, batch_size=4))
            kind.__getitem__ = Kept.__getitem__
            assert torch.equal(next(iter(DataLoader(data, batch_size=4))), torch.ones(4, 2))
    finally:
        kind.__getitem__ = before


STAND_INS = Path(__file__).parents[2] / "benchmarks" / "scripts" / "standins" / "packages"
Image = ModuleType("PIL.Image")
Image.fromarray = lambda image, mode=None: image  # type: ignore[attr-defined]


class Pictures(Dataset):  # type: ignore[type-arg]
    """As torchvision's MNIST and CIFAR10 have it."""

    def __init__(self, pictures: Any, transform: Any) -> None:
        self.data, self.targets = pictures, torch.arange(len(pictures))
        self.transform, self.target_transform = transform, None

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        img, target = self.data[index], int(self.targets[index])
        img = Image.fromarray(img.numpy(), mode="L")  # type: ignore[attr-defined]
        if self.transform is not None:
            img = self.transform(img)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return img, target


class Arrays(Pictures):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        img, target = self.data[index], int(self.targets[index])
        img = Image.fromarray(img)  # type: ignore[attr-defined]
        if self.transform is not None:
            img = self.transform(img)
        return img, target


@pytest.fixture
def transforms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Those of the stand-in for torchvision."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    with monkeypatch.context() as one:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            one.delitem(sys.modules, name)
        yield importlib.import_module("torchvision.transforms")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


@pytest.mark.parametrize("coloured", [False, True])
def test_images_through_known_transforms(transforms: Any, coloured: bool) -> None:
    shape = (11, 6, 5, 3) if coloured else (11, 6, 5)
    pictures: Any = np.random.RandomState(0).randint(0, 256, shape).astype(np.uint8)
    normalize = transforms.Normalize((0.4, 0.5, 0.6) if coloured else (0.13,), (0.2, 0.3, 0.1) if coloured else (0.3,))
    chain = transforms.Compose([transforms.ToTensor(), normalize])
    kind = Arrays if coloured else Pictures
    data, told = kind(pictures if coloured else torch.from_numpy(pictures), chain), list[str]()

    def run() -> list[Any]:
        normalize.mean, pictures[:], chain.transforms = (0.1,), 3, [transforms.ToTensor(), normalize]
        found = epochs_of(data)
        pictures[::2] += 9
        found += epochs_of(data)
        normalize.mean = (0.7,)
        found += epochs_of(data)
        chain.transforms.append(lambda image: image + torch.rand(()))
        return [*found, *epochs_of(data)]

    plain = run()
    assert obstacle_to_batching(data, default_collate) == "its samples go through function"
    chain.transforms.pop()
    assert obstacle_to_batching(data, default_collate) == ""
    with batched_fetch(on_mismatch=told.append):
        assert same_bits(run(), plain)
    assert told == []


def test_transforms_with_hooks_or_of_another_class_are_called(transforms: Any) -> None:
    seen: list[int] = []
    normalize = transforms.Normalize((0.1,), (0.3,))
    normalize.register_forward_hook(lambda *_: seen.append(1))
    own = type("Normalize", (transforms.Normalize,), {"__module__": "script"})((0.1,), (0.3,))
    for last in (normalize, own):
        chain = transforms.Compose([transforms.ToTensor(), last])
        data = Pictures(torch.zeros(4, 6, 5, dtype=torch.uint8), chain)
        assert obstacle_to_batching(data, default_collate)
    assert seen == []


def test_an_error_that_a_script_prints_shows_torchs_frames_and_none_of_ours() -> None:
    dataset = DATA_SETS["row of each"]()
    with batched_fetch():
        epochs_of(dataset, 1)
        with pytest.raises(IndexError) as caught:
            list(DataLoader(dataset, batch_sampler=Listed([[0], [99]])))
    assert caught.value.__context__ is None
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert len(files) > 3
    assert not [file for file in files if file.startswith(str(PACKAGE))]
