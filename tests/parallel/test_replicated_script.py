"""`flatout run --devices`: an unmodified script on two processes trains as on one, or is refused with the reason."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from flatout import environment
from flatout.errors import UsageError
from flatout.report.devices_text import proof_text, sharing_lines
from flatout.script.child_command import child_command
from flatout.script.replicas import agreement, starting
from flatout.script.replicas.agreement import Row, bits
from flatout.script.replicas.losses import complaint, terms_of
from flatout.script.replicas.settings import Facts, Recording, Settings, refusal_of
from flatout.script.replicas.streams import RandomStreams, digest, host_states
from flatout.script.replicas.training_data import NotABatch, Share, digest_with, share_of
from flatout.tuning.devices_proof import DevicesProof
from flatout.tuning.numerics import LevelDifference
from tests.processes import Python

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs namespaces of Linux")

BEGIN = """
import os, sys, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
torch.manual_seed(0)
x, y = torch.randn(38, 6), torch.randint(3, (38,))
data = TensorDataset(x, y)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
"""
LOOP = """
loader = DataLoader(data, batch_size=7, shuffle=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run(source, *options)`: `flatout run OPTIONS train.py` in a folder of its own; no options: by Python alone."""

    def run(source: str, *options: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(textwrap.dedent(source))
        words = child_command("flatout", "run", *options) if options else [sys.executable]
        variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run(
            [*words, "train.py"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=500
        )

    return run


@pytest.mark.slow
def test_two_ranks_train_as_one_device(run: Run, tmp_path: Path) -> None:
    """Batches of 7 and a last one of 3 samples: shares differ, and each loss counts by its samples."""
    source = (
        BEGIN
        + LOOP
        + """
print(f"{sum(p.double().sum().item() for p in model.parameters()):.5f} {norm:.4f}")
print(os.environ.get("RANK"), torch.distributed.is_initialized(), torch.randint(1000, (1,)).item())
with open("log.txt", "a") as log:
    log.write("x")
torch.save(model.state_dict(), "model.pt")
assert torch.load("model.pt")["0.weight"].shape == (8, 6)

import atexit
from pathlib import Path
def threads():
    return [one.read_text().strip() for one in Path("/proc/self/task").glob("*/comm")].count("pt_gloo_runloop")
atexit.register(lambda: print(threads()))
"""
    )
    alone = run(source)
    assert alone.stdout.endswith("\n0\n")  # a thread of gloo that is left then may abort the process
    (tmp_path / "log.txt").unlink()
    shared = run(source, "--devices", "2")
    assert (shared.returncode, shared.stdout) == (0, alone.stdout), shared.stderr
    assert (tmp_path / "log.txt").read_text() == "x"  # rank 1 writes a copy of its own
    assert "2 ranks trained, each on its share of every batch (3 of 7 samples)" in shared.stderr
    assert "12 of 12 batches were shared unevenly" in shared.stderr
    document = json.loads((tmp_path / "flatout-run.json").read_text())
    assert any("2 ranks trained" in note for note in document["plan_notes"])


@pytest.mark.slow
def test_ranks_that_decide_by_their_own_loss_end_with_the_reason(run: Run) -> None:
    stopping = LOOP.replace("optimizer.step()", "optimizer.step()\n        if loss.item() < 1.02: sys.exit()")
    ended = run(BEGIN + stopping, "--devices", "2", "--no-report")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: rank ")
    assert "decide when to stop" in ended.stderr


BY_HAND = """
        optimizer.zero_grad()
        weights = list(model.parameters())
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights)):
            weight.grad = gradient
"""


@pytest.mark.slow
def test_gradients_that_the_script_sets_are_refused(run: Run) -> None:
    ended = run(
        BEGIN + LOOP.replace("        optimizer.zero_grad()\n        loss.backward()\n", BY_HAND), "--devices", "2"
    )
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "the script sets gradients itself, and no backward pass has computed them" in ended.stderr


@pytest.mark.slow
def test_a_part_of_a_model_may_be_called_beside_it(run: Run) -> None:
    beside = "loss = F.cross_entropy(model(a), b) + model[0](a).square().mean()"
    source = BEGIN + LOOP.replace("loss = F.cross_entropy(model(a), b)", beside) + "print(float(loss))"
    plain, shared = run(source), run(source, "--devices", "2", "--loss", "mean")
    assert shared.returncode == 0, shared.stderr
    assert plain.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "options", "status", "said"),
    [
        ((), (), 0, "equal to rounding: 10 steps on 2 devices train as on one"),
        (("Tanh()", "Dropout(0.5)"), (), 0, "equal to rounding without dropout"),
        (("Tanh()", "Dropout(0.5)"), (), 0, "over 5 seeds, with dropout; up to "),
        (("Tanh()", "BatchNorm1d(8)", "size=7", "size=8"), ("--allow-local-batchnorm",), 0, "alike: 8 steps on 2"),
        (("model(a), b", "model(a), b, reduction='sum'"), ("--loss", "sum"), 0, "equal to rounding"),
        (("model(a), b", "model(a), b, reduction='sum'"), ("--loss", "mean"), 1, "different: on 2 devices"),
        (("model(a), b", "model(a), b, ignore_index=2"), ("--loss", "terms"), 0, "equal to rounding"),
        (("shuffle=True", "shuffle=True, num_workers=2, persistent_workers=True"), (), 0, "the same samples in every"),
    ],
    ids=[
        "plain",
        "dropout",
        "dropout over seeds",
        "batch norm",
        "sum",
        "sum taken for a mean",
        "ignored targets",
        "workers",
    ],
)
def test_the_proof(run: Run, change: tuple[str, ...], options: tuple[str, ...], status: int, said: str) -> None:
    source = BEGIN + LOOP
    for old, new in zip(change[::2], change[1::2], strict=True):
        source = source.replace(old, new)
    proved = run(source, "--devices", "2", "--prove", *options)
    assert (proved.returncode, said in proved.stdout) == (status, True), proved.stdout + proved.stderr


REFUSED = {
    "no optimizer": ("F.cross_entropy(model(x), y).backward()", "has made no optimizer"),
    "no loader": (
        "optimizer = torch.optim.SGD(model.parameters())\nF.cross_entropy(model(x[:8]), y[:8]).backward()",
        "train.py:11: the script trains on a batch that no DataLoader handed out",
    ),
    "evaluation mode": (
        "optimizer = torch.optim.SGD(model.parameters())\nmodel.eval()\n"
        "for a, b in DataLoader(data, batch_size=4): F.cross_entropy(model(a), b).backward()",
        "its iterator was made while the model was in evaluation mode",
    ),
    "iterable": (
        "class Stream(IterableDataset):\n    def __iter__(self): return iter(data)\n"
        "optimizer = torch.optim.SGD(model.parameters())\nfor a in DataLoader(Stream(), batch_size=4): pass",
        "Stream is an IterableDataset",
    ),
    "batch of one": (
        "optimizer = torch.optim.SGD(model.parameters())\nfor a in DataLoader(data): pass",
        "batches have 1 sample, and there are 2 ranks",
    ),
    "a plain tensor": (
        "optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)])",
        "the optimizer trains a tensor that is not a torch.nn.Parameter",
    ),
    "DataParallel": ("nn.DataParallel(model)", "uses DataParallel"),
    "torch.distributed": (
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)",
        "uses torch.distributed",
    ),
    "Accelerate": ("import accelerate\naccelerate.Accelerator()", "uses Accelerate's Accelerator"),
    "caught": ("try: nn.DataParallel(model)\nexcept BaseException: print('goes on')", "uses DataParallel"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.first_case
def test_scripts_that_cannot_be_shared_are_refused(tmp_path: Path, python: Python, name: str) -> None:
    """Before any exchange, so that one rank of two shows it."""
    lines, said = REFUSED[name]
    (tmp_path / "train.py").write_text(BEGIN + lines)
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("from accelerate.accelerator import Accelerator")
    (tmp_path / "accelerate" / "accelerator.py").write_text("class Accelerator: pass")
    folder = tmp_path / "ranks"
    folder.mkdir()
    Settings().write(folder)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    variables = {**os.environ, **place, environment.RANKS: str(folder)}
    ended = python("-m", "flatout", "run", "--no-report", "train.py", cwd=tmp_path, env=variables)
    refusal = refusal_of(folder)
    assert (ended.returncode, ended.stderr) == (2, "")
    assert said in str(refusal)
    assert isinstance(refusal, UsageError)
    assert refusal.remedy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "global"], "--batch without --devices"),
        (["--prove"], "--prove without --devices"),
        (["--devices", "0"], "--devices is '0'"),
        (["--devices", "many"], "--devices is 'many'"),
        (["--devices", "9999"], "--devices is 9999"),
        (["--devices", "2", "--batch", "huge"], "--batch is 'huge'; it is one of global, per-device"),
        (["--devices", "2", "--loss", "max"], "--loss is 'max'"),
        (["--devices", "2", "--device", "cuda:0"], "--device"),
        (["--devices", "1", "--prove"], "--prove with one device"),
        (["--devices", "2", "--prove", "--all-ranks-write"], "--all-ranks-write with --prove"),
    ],
)
@pytest.mark.first_case
def test_options_that_mean_nothing_are_refused(tmp_path: Path, python: Python, options: list[str], said: str) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    ended = python("-m", "flatout", "run", *options, "train.py", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert said in ended.stderr


def test_auto_counts_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--devices 2"):
        starting.device_count("auto", on_cpu=True)
    monkeypatch.setattr(starting, "usable_cores", lambda: 4)
    assert starting.device_count("3", on_cpu=True) == (3, ())
    with pytest.raises(UsageError, match="4 cores may be used"):
        starting.device_count("5", on_cpu=True)


# shares


@pytest.mark.parametrize("indices", [list(range(7)), tuple(range(7)), range(7), torch.arange(7)])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_shares_make_up_the_batch_and_their_weights_its_mean(indices: Any, ranks: int) -> None:
    parts = [share_of(indices, rank, ranks) for rank in range(ranks)]
    assert [int(one) for part, _ in parts for one in part] == list(range(7))
    assert all(type(part) is type(indices) for part, _ in parts)
    means = [sum(map(int, part)) / len(part) for part, _ in parts]
    mean = sum(value * share.weight for value, (_, share) in zip(means, parts, strict=True)) / ranks
    assert mean == pytest.approx(3.0)


def test_a_rank_without_a_sample_takes_one_that_counts_nothing() -> None:
    parts = [share_of([5, 6], rank, 3) for rank in range(3)]
    assert sorted((part, share.weight) for part, share in parts) == [([5], 0.0), ([5], 1.5), ([6], 1.5)]


@pytest.mark.parametrize("index", [3, "abc", torch.tensor(3), {"a": 1}])
def test_what_is_no_batch_cannot_be_shared(index: object) -> None:
    with pytest.raises(NotABatch):
        share_of(index, 0, 2)


def test_the_digest_is_that_of_the_order() -> None:
    first = digest_with(0, [1, 2])
    assert digest_with(first, [3]) == digest_with(digest_with(0, torch.tensor([1, 2])), (3,))
    assert digest_with(0, [1, 2]) != digest_with(0, [2, 1])
    assert digest_with(0, [[1, 2]]) == digest_with(0, [[1, 2]])


def test_even_shares() -> None:
    assert Share(4, 8, 2).even
    assert Share(4, 8, 2).weight == 1.0
    assert not Share(3, 7, 2).even


# losses


def test_losses_that_are_no_mean_over_samples_are_seen() -> None:
    scores = torch.nn.Linear(5, 4)(torch.randn(6, 5))
    targets = torch.tensor([0, 1, 2, -100, 1, 0])
    whole = torch.tensor([0, 1, 2, 3, 1, 0])

    def said(loss: torch.Tensor, samples: int | None = None) -> str | None:
        found = complaint(loss, samples)
        return None if found is None else found.instead

    assert said(functional.cross_entropy(scores, whole)) is None
    assert said(functional.cross_entropy(scores, whole) / 2 + scores.square().mean()) is None
    assert said(functional.cross_entropy(scores, targets)) == "terms"
    assert said(functional.cross_entropy(scores, whole, weight=torch.rand(4))) == "terms"
    assert said(functional.cross_entropy(scores, whole, reduction="sum")) == "sum"
    both = functional.binary_cross_entropy(scores.sigmoid(), torch.rand(6, 4), reduction="sum")
    assert said(scores.square().mean() + both) == "sum"
    assert said(-scores.sum()) == "sum"
    assert said(-scores.sum() / 6) == "sum where that number is the same on all devices"
    assert said(scores.sum() / 6, samples=6) is None  # the mean of a share, as of reduction='batchmean'
    assert said(scores.sum() / 12, samples=6) == "sum where that number is the same on all devices"
    mask = torch.tensor([True, False, True, True, False, True])
    assert said(functional.cross_entropy(scores[mask], whole[mask])) == "terms"
    assert said(functional.cross_entropy(scores[mask.nonzero().squeeze(1)], whole[mask]), samples=6) == "terms"
    assert said(functional.cross_entropy(scores.repeat(3, 1), whole.repeat(3)), samples=6) is None
    assert said(functional.mse_loss(scores[mask], torch.zeros(4, 4))) == ""
    assert said((2 * scores.masked_select(mask[:, None]) + 1).square().mean()) == ""
    assert said(scores.log_softmax(1)[torch.arange(6), whole].mean().neg()) is None
    assert terms_of(functional.cross_entropy(scores, targets) / 4) == 5.0
    assert terms_of(scores.square().mean()) is None


def test_losses_that_are_no_linear_function_of_means_are_seen() -> None:
    layer, log_scale = torch.nn.Linear(4, 3), torch.nn.Parameter(torch.zeros(()))
    x, y = torch.randn(6, 4), torch.randn(6, 3)

    def found(loss: torch.Tensor) -> str:
        seen = complaint(loss, 6)
        return "" if seen is None else seen.what

    mse = functional.mse_loss(layer(x), y)
    assert "is Sqrt of what was averaged" in found(mse.sqrt())
    assert "is Pow of what was averaged" in found(2 * mse**2 + 1)
    assert "is LinalgVectorNorm of all samples" in found((layer(x) - y).norm())
    assert "is Std of all samples" in found(-layer(x).std())
    assert "a product or a ratio of two figures" in found(1 - layer(x).sum() / layer(x).square().sum())
    assert "a product or a ratio of two figures" in found(mse * layer(x).square().mean())
    assert "is Reciprocal of what was averaged" in found(1 / mse)
    assert "a product or a ratio of two figures" in found(torch.tensor(2.0) / mse)
    # penalties on weights, and learned weights of losses, are the same on all ranks
    assert found(mse + 1e-3 * sum(one.norm() for one in layer.parameters())) == ""
    assert found(mse + 1e-3 * sum((one**2).sum() for one in layer.parameters())) == ""
    assert found(mse + (layer.weight @ layer.weight.T - torch.eye(3)).norm()) == ""
    assert found(torch.exp(-log_scale) * mse + log_scale) == ""
    assert found(mse / (2 * log_scale.exp()) + log_scale.exp().log()) == ""


# random numbers


def test_a_rank_draws_its_own_numbers_in_its_model_and_the_common_ones_elsewhere() -> None:
    torch.manual_seed(3)
    random.seed(3)
    plain = [torch.rand(1).item(), torch.rand(1).item(), random.random()]
    drawn = []
    for rank in range(2):
        torch.manual_seed(3)
        random.seed(3)
        streams = RandomStreams(rank)
        with streams.own(python=True):
            own = [torch.rand(2 + rank).tolist()[0], random.random()]
            with streams.common():
                common = [torch.rand(1).item()]
            own.append(torch.rand(1).item())
        common += [torch.rand(1).item(), random.random()]
        assert common == plain
        assert streams.drew
        with streams.own():
            own.append(torch.rand(1).item())
        assert len(set(own)) == len(own)  # the stream goes on
        drawn.append(own)
    assert not set(drawn[0]) & set(drawn[1])


def test_a_model_without_dropout_draws_nothing() -> None:
    streams = RandomStreams(1)
    before = digest(host_states())
    with streams.own(python=True):
        torch.nn.Linear(2, 2).weight.sum()  # initial weights are drawn
    assert digest(host_states()) == before
    assert streams.drew
    quiet = RandomStreams(1)
    with quiet.own():
        torch.zeros(3).sum()
    assert not quiet.drew


# agreement


def test_ranks_at_the_same_place_agree() -> None:
    row = Row(event=agreement.UPDATE, backwards=3, batches=2, order=5, gradients=1)
    assert agreement._difference([row, Row(**{**vars(row), "gradients": 2})], 0) is None
    assert agreement._difference([Row(event=agreement.END)] * 2, 0) is None
    assert Row(event=agreement.LOSS, given=bits(2.5)).number == 2.5


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"event": agreement.END}, "rank 0 reads its gradients, and rank 1 has ended"),
        ({"event": agreement.FAILED}, "rank 1 has failed"),
        ({"order": 9}, "different batches"),
        ({"batches": 9}, "different batches"),
        ({"backwards": 4}, "rank 0 has made 3 backward passes, and rank 1 has made 4"),
        ({"rates": 9}, "learning rates"),
        ({"weights": 9}, "weights of the ranks differ"),
    ],
)
def test_ranks_that_part_say_how(other: dict[str, int], said: str) -> None:
    row = {"event": agreement.UPDATE, "backwards": 3}
    reason = agreement._difference([Row(**row), Row(**{**row, **other})], 0)
    assert reason is not None
    assert said in reason.what
    assert reason.failed or (reason.limit and reason.remedy)


# what is said, and what ranks are told


def test_settings_and_facts_are_read_as_they_were_written(tmp_path: Path) -> None:
    recording = Recording(steps=3, role="checked", nudge_ulps=1, reference="/x", checks=(0, 2))
    settings = Settings(batch="per-device", loss="terms", visible=("0", "GPU-1"), recording=recording)
    settings.write(tmp_path)
    assert Settings.read(tmp_path) == settings
    assert Facts.read(tmp_path) is None
    facts = Facts(ranks=2, updates=1, samples=8, own_samples=4, unseeded=("a",))
    facts.write(tmp_path)
    assert Facts.read(tmp_path) == facts


def test_what_a_user_has_to_know_is_said() -> None:
    assert "nothing was shared" in sharing_lines(Facts(ranks=2), Settings())[0]
    trained = Facts(ranks=2, updates=9, batches=9, samples=8, own_samples=4)
    assert "rank 0's share" in sharing_lines(trained, Settings())[0]
    larger = Facts(ranks=2, updates=9, samples=16, own_samples=8, multiplied=True, batch_norms=2, realigned=1)
    said = "\n".join(sharing_lines(larger, Settings(batch="per-device", loss="sum")))
    for part in ("2 times the script's", "learning rate", "2 batch norms", "gradients were added", "apart once"):
        assert part in said


def test_a_statistical_verdict_says_what_counts_as_alike() -> None:
    proof = DevicesProof(
        verdict="alike",
        reason="",
        devices=2,
        steps=40,
        samples_equal=True,
        losses=(1.0, 0.5),
        losses_on_all=(1.0, 0.5),
        largest_loss_difference=0.1,
        rounding_loss_difference=1e-7,
        largest_gradient_difference=0.1,
        rounding_gradient_difference=1e-7,
        over_seeds=LevelDifference(mean=0.004, half_width=0.015, pairs=5),
    )
    text = proof_text(proof)
    assert text.startswith("alike: 40 steps on 2 devices reach the losses of one device, over 5 seeds\n")
    assert "+0.4% (±1.5%) off those on one device, over 5 seeds; up to 1.5% counts as alike" in text
    assert json.loads(json.dumps(proof.to_json()))["over_seeds"] == {"mean": 0.004, "half_width": 0.015, "pairs": 5}
    without = proof_text(replace(proof, verdict="equal to rounding", without_dropout=True))
    assert "over 5 seeds, with dropout; up to" in without


def test_a_launchers_variables_are_hidden_from_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_put_aside", {})
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "h"}.items():
        monkeypatch.setenv(name, value)
    environment.put_ranks_aside()
    assert not {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"} & set(os.environ)
    assert environment.rank() == 1
    with environment.ranks_shown():
        assert os.environ["TORCHELASTIC_RUN_ID"] == "x"
    assert "RANK" not in os.environ
