"""A script for the CPU, moved to a device that refuses to be mixed with it: the same numbers, to rounding."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flatout.script.describe import names_device
from tests.processes import Python

STAND_IN = Path(__file__).parent / "standins" / "accelerator.py"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
one_accelerator = pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="torch allows one accelerator, and its CUDA builds have theirs: see tests/gpu/test_moved_to_device.py",
)

HEAD = """
import copy, io, numpy, torch, warnings
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message="The operator|.*deprecated")
torch.manual_seed(0)
torch.set_num_threads(1)
def where(): return next(model.parameters()).device.type
"""

CLASSIFIER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.scale = torch.full((16,), 1.5)          # neither a parameter nor a buffer
    def forward(self, x):
        h = self.norm(torch.relu(self.first(x))) * self.scale
        return self.last(h + torch.arange(16) / 16)  # made on the CPU in the forward
model = Net()
held = [*model.parameters(), model.scale, model.norm.running_mean]
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0, 0.5]))
x, y = torch.randn(48, 6), torch.randint(0, 4, (48,))
total, losses = torch.zeros(()), []
for epoch in range(3):
    for inputs, targets in DataLoader(TensorDataset(x, y), 16, shuffle=True):
        out = model(inputs)
        loss = criterion(out, targets) + 1e-3 * sum(p.square().sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.detach()
        losses.append(loss.item())
        right = (out.argmax(1) == targets).float().mean()
        array = out.detach().numpy()
        assert isinstance(array, numpy.ndarray) and numpy.asarray(right).shape == ()
    schedule.step()
model.eval()
with torch.no_grad():
    scores = model(x)
    hits = (scores.argmax(1) == y).sum().item()
    confusion = torch.zeros(4, 4)
    confusion.index_put_((y, scores.argmax(1)), torch.ones(48), accumulate=True)
file = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
file.seek(0)
saved = torch.load(file)
assert all(one.device.type == "cpu" for one in saved["model"].values())
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
assert [id(one) for one in held] == [id(one) for one in (*model.parameters(), model.scale, model.norm.running_mean)]
assert {one.device.type for one in held} == {where()}
print(where())
statistics = [model.norm.running_mean.sum().item(), model.norm.running_var.sum().item()]
print(*losses, hits, confusion.sum().item(), float(total) / 9, *statistics)
"""

LANGUAGE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(11, 8), nn.GRU(8, 8, batch_first=True)
        self.mask = torch.tril(torch.ones(5, 5))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, x, h, targets=None):
        e, h = self.rnn(self.embed(x), h)
        w = (e @ e.transpose(1, 2)).masked_fill(self.mask == 0, float("-inf")).softmax(-1)
        logits = self.head(w @ e)
        return logits, h, functional.cross_entropy(logits.view(-1, 11), targets.view(-1))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
average = copy.deepcopy(model)
losses = []
h = torch.zeros(1, 3, 8)
for step in range(6):
    x = torch.randint(0, 11, (3, 5))
    logits, h, loss = model(x, h.detach(), targets=x.roll(1, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters()):
            old.mul_(0.9).add_(new, alpha=0.1)
    losses.append(loss.item())
print(where())
print(*losses, *[p.sum().item() for p in average.parameters()])
"""

LACKING = """
model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
x, y = torch.randn(4, 1, 6, 6), torch.tensor([0, 1, 0, 1])
losses = []
for step in range(4):
    loss = functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(where())
print(*losses)
"""

FAILING = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 2)
    def forward(self, x):
        if self.last.weight.device.type != "c" + "pu":
            raise TypeError("not here")
        return self.last(x)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
losses = []
for step in range(4):
    loss = model(torch.randn(5, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(where())
print(*losses)
"""

WIDE = """
model = nn.Sequential(nn.Embedding(2048, 8), nn.Linear(8, 2048))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
x = torch.randint(0, 2048, (4, 160))
losses = []
for step in range(3):
    scores = model(x)
    loss = functional.cross_entropy(scores.view(-1, 2048), x.roll(1, 1).view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(where(), type(scores).__name__)
print(*losses)
"""

MISTAKEN = """
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
out = model(torch.randn(5, 3))
try:
    functional.nll_loss(out, torch.randn(7, 2))
except ValueError as error:
    print("own mistake:", error)
optimizer.zero_grad()
out.sum().backward()
optimizer.step()
print(where())
print(out.sum().item())
"""


Run = Callable[..., tuple[list[str], str]]


@pytest.fixture
def run(python: Python, tmp_path: Path) -> Run:
    def run(source: str, *, moved: bool, **environment: str) -> tuple[list[str], str]:
        """(lines of stdout, stderr)"""
        (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(source))
        words = [str(STAND_IN), "train.py"] if moved else ["train.py"]
        done = python(*words, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), done.stderr

    return run


def test_without_a_gpu_the_plan_is_taken_back_and_the_script_runs(tmp_path: Path, python: Python) -> None:
    """Through `flatout run`, in the environment of a machine whose GPUs are hidden."""
    (tmp_path / "train.py").write_text(HEAD + FAILING)
    (tmp_path / "plan.toml").write_text('schema = 1\n[plan]\ndevice = "cuda"\n')
    command = ["-m", "flatout", "run", "--plan", "plan.toml", "--trust-plan", "--report", "run.json", "train.py"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "FLATOUT_CACHE_DIR": str(tmp_path / ".cache")}
    done = python(*command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "cpu"
    (entry,) = json.loads((tmp_path / "run.json").read_text())["rolled_back"]
    assert entry["label"] == "moved to the GPU"
    assert "no CUDA device 0" in entry["reason"]


@pytest.mark.parametrize(
    ("source", "speaks"),
    [
        ("import torch\nmodel.train()", False),
        ("x = x.to(device)", True),
        ("parser.add_argument('--device', default='none')", True),
        ("model.cuda()", True),
        ("model.to('cuda:1')", True),
        ("torch.zeros(3, device=where)", True),
        ("use = args.no_cuda_device", True),
        ("def f(:", False),
    ],
)
def test_a_script_that_speaks_of_devices_is_left_to_itself(tmp_path: Path, source: str, speaks: bool) -> None:
    (tmp_path / "train.py").write_text(source)
    assert names_device(str(tmp_path / "train.py")) is speaks
    assert not names_device(None)


def assert_same(plain: list[str], moved: list[str]) -> None:
    ours, theirs = ([float(word) for word in lines[-1].split()] for lines in (moved, plain))
    assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-6)


@one_accelerator
@pytest.mark.parametrize(
    "source",
    [pytest.param(CLASSIFIER, id="classifier", marks=pytest.mark.slow), pytest.param(LANGUAGE, id="language")],
)
def test_the_same_numbers_on_the_device(run: Run, source: str) -> None:
    (plain, _), (moved, told) = run(source, moved=False), run(source, moved=True)
    assert (plain[0], moved[0]) == ("cpu", "hpu"), told
    assert_same(plain, moved)
    assert "rolled back" not in told


@one_accelerator
@pytest.mark.slow
def test_with_the_scores_of_a_wide_layer_never_formed_there(run: Run) -> None:
    (plain, _), (moved, told) = run(WIDE, moved=False), run(WIDE, moved=True, CHUNKED="1")
    assert (plain[0], moved[0]) == ("cpu Tensor", "hpu LazyScores"), told
    assert_same(plain, moved)
    assert told == ""


@pytest.mark.slow
@one_accelerator
def test_an_operation_that_the_device_lacks_runs_on_the_cpu_and_is_told(run: Run) -> None:
    (plain, _), (moved, told) = run(LACKING, moved=False), run(LACKING, moved=True)
    assert moved[0] == "hpu"
    assert_same(plain, moved)
    assert "conv2d runs on the CPU" in told


@one_accelerator
def test_a_forward_that_fails_there_is_the_scripts_to_handle(run: Run) -> None:
    with pytest.raises(AssertionError, match="TypeError: not here"):
        run(FAILING, moved=True)


@one_accelerator
def test_a_mistake_of_the_scripts_stays_its_own(run: Run) -> None:
    (plain, _), (moved, _) = run(MISTAKEN, moved=False), run(MISTAKEN, moved=True)
    assert moved[0] == plain[0]
    assert moved[1] == "hpu"
