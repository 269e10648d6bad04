"""Ranks that train on GPUs against the same training without ranks: over NCCL with a GPU each, and two that share one
over gloo, as NCCL refuses two ranks on one GPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

import flatout
from flatout.memory.tracking import Tracker

NCCL = distributed.is_available() and distributed.is_nccl_available()
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and distributed.is_available()), reason="needs a CUDA GPU and torch.distributed"
)

TRAINING = """
import json, os, sys
import torch
import flatout
from torch.nn.functional import cross_entropy

strategy, precision, backend = sys.argv[1:]
strategy, _, offloaded = strategy.partition("-")
shared = strategy in ("tensor", "pipeline")
together = 2 if strategy == "fsdp+tensor" else 1
if backend:
    torch.cuda.set_device(0)
    torch.distributed.init_process_group(backend)
here = flatout.ranks()
torch.manual_seed(0)
config = flatout.models.GPT2Config(
    vocab_size=64, max_tokens=16, width=32, heads=4, layers=2,
    dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0,
)
model = flatout.models.GPT2(config)
if not offloaded:
    model.to(here.device)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1)).to(here.device)
mine = tokens if shared else tokens.chunk(here.count // together)[here.rank // together]

def loss(model, batch):
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

kind = None if strategy == "none" else strategy.partition("+")[0]
plan = flatout.Plan(parallel=kind, tensor_ranks=together if together > 1 else None, precision=precision or None)
if kind == "pipeline":
    plan = plan.with_choice("micro_batches", 2, "one for each stage")
if offloaded:
    plan = plan.with_choice("fsdp_cpu_offload", True, "the model does not fit")
step = flatout.TrainStep(model, optimizer, loss, plan, clip_norm=0.5)
losses = []
for _ in range(4):
    value = step(mine).detach().clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(value)
    losses.append(float(value) / here.count)
places = {str(one.device.type) for one in step.model.parameters()}
places |= {str(one.device.type) for state in optimizer.state.values() for one in state.values()}
assert not offloaded or (places == {"cpu"} and step.device.type == "cuda"), (places, step.device)
scores = [float(one.double().abs().sum()) for one in flatout.predict(model, tokens[:5, :12])]  # on all ranks
backend = str(torch.distributed.get_backend()) if torch.distributed.is_initialized() else None
if here.rank == 0:
    known = {"device": str(here.device), "count": here.count, "backend": backend}
    print(json.dumps({"losses": losses, "scores": scores, **known}))
if backend and "gloo" in backend:
    sys.stdout.flush()
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads at times abort the interpreter's own end
"""


def script(folder: Path) -> str:
    path = folder / "training.py"
    path.write_text(TRAINING)
    return str(path)


def found_in(text: str) -> dict[str, object]:
    line = next(one for one in text.splitlines() if "losses" in one)
    found: dict[str, object] = json.JSONDecoder().raw_decode(line[line.index("{") :])[0]
    return found


def trained(folder: Path, strategy: str, precision: str, *launcher: str) -> dict[str, object]:
    command = [sys.executable, *launcher, script(folder), strategy, precision, ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return found_in(done.stdout)


def trained_by_several(folder: Path, strategy: str, precision: str, ranks: int = 2) -> dict[str, object]:
    """As on so many machines with a GPU each, which are this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    command = [sys.executable, script(folder), strategy, precision, "cpu:gloo,cuda:gloo"]
    every = [
        subprocess.Popen(
            command,
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        texts = [one.communicate(timeout=240)[0] for one in every]
    finally:
        for one in every:
            one.kill()
    assert [one.returncode for one in every] == [0] * ranks, "\n".join(texts)
    return found_in(texts[0])


@pytest.mark.skipif(not NCCL, reason="needs NCCL")
@pytest.mark.parametrize("precision", ["", "bf16"])
def test_one_rank_over_nccl(tmp_path: Path, precision: str) -> None:
    expected = trained(tmp_path, "none", precision)
    for strategy in ("ddp", "zero1", "fsdp"):
        found = trained(tmp_path, strategy, precision, "-m", "flatout", "launch", "--nproc-per-node", "1")
        assert (found["device"], found["count"]) == ("cuda:0", 1)
        assert "nccl" in str(found["backend"])
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=2e-2 if precision else 1e-4, atol=0)


@pytest.mark.skipif(not NCCL or torch.cuda.device_count() < 2, reason="needs NCCL and two GPUs")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "fsdp-offloaded", "tensor", "pipeline"])
def test_two_ranks_over_nccl_with_a_gpu_each(tmp_path: Path, strategy: str) -> None:
    expected = trained(tmp_path, "none", "")
    found = trained(tmp_path, strategy, "", "-m", "flatout", "launch", "--nproc-per-node", "2")
    assert (found["device"], found["count"]) == ("cuda:0", 2)
    assert "nccl" in str(found["backend"])
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-4, atol=0)
    torch.testing.assert_close(found["scores"], expected["scores"], rtol=1e-3, atol=0)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "fsdp-offloaded"])
def test_two_ranks_that_share_a_gpu(tmp_path: Path, strategy: str) -> None:
    expected = trained(tmp_path, "none", "")
    found = trained_by_several(tmp_path, strategy, "")
    assert (found["device"], found["count"]) == ("cuda:0", 2)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-4, atol=0)
    torch.testing.assert_close(found["scores"], expected["scores"], rtol=1e-3, atol=0)


def test_four_ranks_that_share_layers_and_shard_their_parts(tmp_path: Path) -> None:
    expected = trained(tmp_path, "none", "")
    found = trained_by_several(tmp_path, "fsdp+tensor", "", 4)
    assert (found["device"], found["count"]) == ("cuda:0", 4)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-4, atol=0)
    torch.testing.assert_close(found["scores"], expected["scores"], rtol=1e-3, atol=0)


def test_what_fsdp_gathers_on_its_own_streams_has_segments_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(768, 768), torch.nn.ReLU(), torch.nn.Linear(768, 8)).cuda()
    loss = flatout.supervised(torch.nn.CrossEntropyLoss())
    step = flatout.TrainStep(model, torch.optim.AdamW(model.parameters()), loss, flatout.Plan(parallel="fsdp"))
    batch = torch.zeros(8, 768, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda")
    apart = flatout.forecast(step, batch, ranks=2)
    monkeypatch.setattr(Tracker, "_stream", lambda *_: 0)
    together = flatout.forecast(step, batch, ranks=2)
    assert apart.tensor_bytes == together.tensor_bytes
    assert apart.peak_bytes >= together.peak_bytes + 20 * 2**20
