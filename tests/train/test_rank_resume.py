"""Several ranks, interrupted and resumed, are the run that was never interrupted: each has its own dropout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from flatout.checkpoint.folder import Checkpoints

STEPS, CUT = 12, 4
FIRST, LATER = 10, 500
"""Seeds of a run that begins, and of a process that resumes one: only a checkpoint makes the two draw alike."""

TRAIN = """
import random, signal, warnings
import numpy as np
from flatout import Checkpoints, TrainStep, batches, fit
warnings.simplefilter("always")
out, folder, steps, seed, signalled = *sys.argv[4:6], *map(int, sys.argv[6:9])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 1))
source = batches((torch.randn(40, 6), torch.randn(40, 1)), 8, seed=3)
torch.manual_seed(seed + rank), random.seed(seed + rank), np.random.seed(seed + rank)
calls = 0
def loss_fn(model, batch):
    global calls
    calls += 1
    if signalled == rank and calls == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    noise = random.random() + np.random.rand()
    return ((model(batch[0]) - batch[1]) * noise).square().mean()
step = TrainStep(
    DistributedDataParallel(model) if ranks > 1 else model, torch.optim.AdamW(model.parameters(), 0.01), loss_fn
)
try:
    done = fit(step, source, steps=steps, checkpoints=Checkpoints(folder) if folder != "none" else None)
except SystemExit as end:
    print("left after", step.steps, "with", end.code)
    leave()
print("resumed at", done.resumed_at_step)
draws = torch.rand(3).tolist(), random.random(), np.random.rand()
torch.save([[one.detach() for one in model.parameters()], draws], f"{out}.{rank}")
leave()
"""


class Runs:
    """Runs of some ranks in one folder."""

    def __init__(self, run_ranks: Any, folder: Path) -> None:
        self._run_ranks, self.folder = run_ranks, folder
        self._out = str(folder.parent / "out")

    def train(self, ranks: int, steps: int, seed: int, *, saves: bool = True, signalled: int = -1) -> list[Any]:
        """(stdout, stderr) of each rank."""
        where = self.folder if saves else "none"
        found = self._run_ranks(TRAIN, ranks, self._out, where, steps, seed, signalled)
        assert [code for code, _, _ in found] == [0] * ranks, found
        return [texts for _, *texts in found]

    def ended(self, rank: int) -> Any:
        """(weights, what each generator draws next)."""
        return torch.load(f"{self._out}.{rank}")


def assert_same(one: Any, other: Any) -> None:
    assert one[1] == other[1]
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def test_a_resumed_run_of_two_ranks_is_the_undisturbed_one(run_ranks: Any, tmp_path: Path) -> None:
    runs = Runs(run_ranks, tmp_path / "run")
    runs.train(2, STEPS, FIRST, saves=False)
    undisturbed = [runs.ended(rank) for rank in range(2)]
    assert undisturbed[0][1] != undisturbed[1][1]
    runs.train(2, CUT, FIRST)
    texts = runs.train(2, STEPS, LATER)
    for rank in range(2):
        assert texts[rank] == [f"resumed at {CUT}\n", ""]
        assert_same(runs.ended(rank), undisturbed[rank])


def test_another_number_of_ranks_takes_it_up_and_says_so(run_ranks: Any, tmp_path: Path) -> None:
    wide, narrow = Runs(run_ranks, tmp_path / "wide"), Runs(run_ranks, tmp_path / "narrow")
    wide.train(2, CUT, FIRST)
    ((out, said),) = wide.train(1, STEPS, LATER)
    assert out == f"resumed at {CUT}\n"
    assert "ranks whose random states were saved: 2; ranks here: 1; the rest is not used" in said
    narrow.train(1, CUT, FIRST)
    ends = []
    for seed in (LATER, LATER + 50):  # the further rank's states follow from the checkpoint alone
        (out, said), quiet = narrow.train(2, CUT + 1, seed)
        assert out == f"resumed at {CUT}\n"
        assert "ranks whose random states were saved: 1; ranks here: 2; the additional ones get new states" in said
        assert quiet == [out, ""]
        ends.append([narrow.ended(rank) for rank in range(2)])
        newest = Checkpoints(narrow.folder).latest()
        assert newest is not None
        shutil.rmtree(newest.folder)
    assert ends[0][0][1] != ends[0][1][1]
    for one, other in zip(*ends, strict=True):
        assert_same(one, other)


def test_asked_on_one_rank_all_stop_after_the_same_step(run_ranks: Any, tmp_path: Path) -> None:
    for signalled in range(2):
        runs = Runs(run_ranks, tmp_path / f"run{signalled}")
        texts = runs.train(2, 1000, FIRST, signalled=signalled)
        loaded = Checkpoints(runs.folder).load()
        assert loaded is not None
        assert 3 <= loaded.step < 100
        assert [out for out, _ in texts] == [f"left after {loaded.step} with 143\n"] * 2
        assert len(loaded.state["generators"]["other_ranks"]) == 1


DECIDE = """
from flatout import CSVLog, Patience, TrainStep, UsageError, batches, evaluate, fit
folder, epochs = sys.argv[4], int(sys.argv[5])
torch.manual_seed(0)
x = torch.randn(44, 6)
y = x.sum(1, keepdim=True)
model = DistributedDataParallel(nn.Linear(6, 1)) if ranks > 1 else nn.Linear(6, 1)
def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean(), {"mean": batch[0].mean()}
optimizer = torch.optim.SGD(model.parameters(), 0.01)
step = TrainStep(model, optimizer, loss_fn)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
def evaluation():
    score = [[3.0, 2.0], [1.0, 3.0], [9.0, 9.0], [1.0, 7.0], [0.0, 0.0]][step.steps // 6 - 1]
    return {"loss": score[rank] if ranks > 1 else sum(score) / 2}
done = fit(
    step, batches((x, y), 8, seed=3), epochs=epochs, evaluation=evaluation, patience=2, epoch_scheduler=scheduler,
    checkpoints=folder, save_every_steps=4, steps=None if epochs > 3 else 8, loggers=[CSVLog(folder + ".csv")],
    stop_when=lambda figures: rank == 1 and step.steps == 600,
)
print(done.epochs, done.ended, [one["loss"] for one in done.evaluations], optimizer.param_groups[0]["lr"])
print(round(done.loss, 5), round(done.figures["mean"], 5))
leave()
"""


def test_ranks_decide_alike_and_log_once(run_ranks: Any, tmp_path: Path) -> None:
    (_, alone, _), *_ = run_ranks(DECIDE, 1, tmp_path / "one", 9)
    run_ranks(DECIDE, 2, tmp_path / "two", 2)  # ends within an epoch
    found = run_ranks(DECIDE, 2, tmp_path / "two", 9)
    assert [code for code, _, _ in found] == [0, 0], found
    assert found[0][1] == found[1][1]
    first, means = found[0][1].splitlines()
    assert first.startswith("4 patience [2.0, 9.0, 4.0] ")
    assert alone.splitlines()[0].startswith("4 patience [2.5, 2.0, 9.0, 4.0]")
    assert means == alone.splitlines()[1]
    rows = [line.split(",") for line in (tmp_path / "two.csv").read_text().splitlines()]
    steps = [row[0] for row in rows[1:] if row[1]]
    assert steps == [str(i + 1) for i in range(24)]
