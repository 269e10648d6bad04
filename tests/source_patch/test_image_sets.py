"""Whole batches of torchvision's image sets, as `flatout diff` writes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.source_patch.test_forms import changed_lines, patch_for

STAND_INS = Path(__file__).parents[2] / "benchmarks" / "scripts" / "standins" / "packages"

LOADING = """
import torch
from torchvision import datasets, transforms

torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kwargs = {"batch_size": 4, "shuffle": True}
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
pictures = datasets.MNIST("data", train=True, download=True, transform=transform)
test_pictures = datasets.MNIST("data", train=False, transform=transform)
loader = torch.utils.data.DataLoader(pictures, **kwargs)
test_loader = torch.utils.data.DataLoader(test_pictures, batch_size=3)
batches = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        batches += [x, y]
for x, y in test_loader:
    batches += [x, y]
batches += [torch.rand(3), torch.tensor(len(loader.dataset))]
"""
PLAIN = "transform = transforms.ToTensor()"
BOTH = "transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])"
COLOURED = LOADING.replace("MNIST", "CIFAR10").replace("(0.1307,), (0.3081,)", "(0.5, 0.4, 0.3), (0.2, 0.2, 0.3)")


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in of the benchmarks: the real one needs a download of its data."""
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setenv("STANDIN_TRAIN_SAMPLES", "30")
    monkeypatch.setenv("STANDIN_TEST_SAMPLES", "10")
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "torchvision"}
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    sys.modules.update(before)


def test_a_subclass_makes_whole_batches(tmp_path: Path) -> None:
    """It has the same name, by which torchvision finds the folder of the data."""
    assert changed_lines(patch_for(tmp_path, LOADING, fetch="batched")) == (
        "+\n"
        "+\n"
        "+class MNIST(datasets.MNIST):\n"
        '+    """Makes whole batches at once."""\n'
        "+\n"
        "+    def __getitems__(self, indices):\n"
        "+        images = self.data[indices].unsqueeze(1).float().div(255)\n"
        "+        for transform in self.transform.transforms[1:]:\n"
        "+            images = transform(images)\n"
        "+        return images, self.targets[indices].long()\n"
        '-pictures = datasets.MNIST("data", train=True, download=True, transform=transform)\n'
        '+pictures = MNIST("data", train=True, download=True, transform=transform)\n'
        "-loader = torch.utils.data.DataLoader(pictures, **kwargs)\n"
        "+loader = torch.utils.data.DataLoader(pictures, **kwargs, collate_fn=list)\n"
    )


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize(
    "source",
    [
        LOADING,
        LOADING.replace(BOTH, PLAIN),
        LOADING.replace("pictures, **kwargs", "dataset=pictures, batch_size=7, drop_last=True"),
        LOADING.replace('"data", train=True, download=True, transform=transform', '"data", True, transform'),
        COLOURED,
    ],
    ids=["normalized", "to tensor", "keywords", "positional", "coloured"],
)
def test_whole_batches_are_the_loaders_own(tmp_path: Path, source: str) -> None:
    """Also the random numbers that are drawn after them."""
    patch = patch_for(tmp_path, source, fetch="batched")
    assert patch.left == ()
    plain: dict[str, Any] = {"__name__": "plain"}
    patched: dict[str, Any] = {"__name__": "patched"}
    exec(source, plain)
    exec(patch.files[0].content, patched)
    assert hasattr(patched["pictures"], "__getitems__")
    assert type(patched["pictures"]).__name__ == type(plain["pictures"]).__name__
    assert len(plain["batches"]) == len(patched["batches"])
    for mine, theirs in zip(patched["batches"], plain["batches"], strict=True):
        assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (BOTH, BOTH.replace("transforms.ToTensor(),", "transforms.RandomRotation(9), transforms.ToTensor(),"), "alone"),
        (BOTH, BOTH.replace("[transforms.ToTensor(), ", "["), "alone"),
        (BOTH, "transform = mine", "does not show that MNIST goes through ToTensor and Normalize alone"),
        ("True, transform=transform", "True", "alone"),
        ("True, transform=transform", "True, transform=transform, target_transform=str", "alone"),
        ("True, transform=transform", "True, transform=transform, **more", "alone"),
        ("shuffle", "collate_fn", "the loader's own only without collate_fn"),
        (
            "batches = []",
            "part = torch.utils.data.Subset(pictures, range(9))",
            "nothing else uses pictures",
        ),
        ("batches = []", "loader.dataset.transform = None", "the loader's own only without .dataset.transform"),
        ("DataLoader(pictures, **kwargs)", "DataLoader(own(pictures), **kwargs)", "known only when it runs"),
        (
            "loader = torch.utils.data.DataLoader(pictures, **kwargs)",
            "def loaded(images):\n    return torch.utils.data.DataLoader(images, **kwargs)\nloader = loaded(pictures)",
            "does not show that nothing else uses images",
        ),
        (BOTH, f"{PLAIN}\nif kwargs:\n    {BOTH}", "alone"),
        ("import datasets", "import datasets; from torchvision.datasets import MNIST", "MNIST is a name that other"),
        ("(pictures, **kwargs)", "(**kwargs)", "does not show the loader's data set"),
    ],
)
def test_loaders_that_are_left(tmp_path: Path, old: str, new: str, reason: str) -> None:
    assert old in LOADING
    patch = patch_for(tmp_path, LOADING.replace(old, new, 1), fetch="batched")
    assert patch.files == ()
    assert reason in patch.left[0].reason
