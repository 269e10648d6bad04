"""What patched scripts compute: the batches, losses and weights that they had, or those of the plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from flatout.plan import Plan, write_plan
from flatout.source_patch.known_calls import LOSSES
from tests.processes import Python
from tests.source_patch.patching import applied, patch_for
from tests.source_patch.test_forms import EPOCHS

EXAMPLES = Path(__file__).parents[2] / "examples"

LOADING = """\
import torch
import torch.utils.data

torch.manual_seed({seed})
seeded = torch.Generator().manual_seed(3)
data = torch.utils.data.TensorDataset(torch.arange(23.0).view(23, 1), torch.arange(23))
loader = torch.utils.data.DataLoader(data, {arguments})
model, batches = torch.nn.Linear(1, 1), []
for epoch in range(2):
    for x, y in loader:
        model(x).sum().backward()
        batches += [x, y]
batches += [torch.rand(3), len(loader)]
"""


@pytest.mark.parametrize(
    "arguments",
    [
        "4, True",
        "batch_size=4",
        "batch_size=5, shuffle=True, drop_last=True",
        "batch_size=5, shuffle=True, generator=seeded",
        "batch_size=4, sampler=torch.utils.data.SubsetRandomSampler(range(9))",
        "shuffle=False",
    ],
)
def test_whole_batches_are_the_loaders_own(tmp_path: Path, arguments: str) -> None:
    """Also the random numbers that are drawn after them."""
    source = LOADING.format(seed=7, arguments=arguments)
    patch = patch_for(tmp_path, source, fetch="batched")
    assert patch.left == ()
    plain: dict[str, Any] = {}
    patched: dict[str, Any] = {}
    exec(source, plain)
    exec(patch.files[0].content, patched)
    assert plain["loader"].batch_size != patched["loader"].batch_size
    assert len(plain["batches"]) == len(patched["batches"])
    for mine, theirs in zip(patched["batches"], plain["batches"], strict=True):
        assert mine == theirs if isinstance(mine, int) else torch.equal(mine, theirs)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_may_stand_inside_autocast_are_computed_in_fp32(name: str) -> None:
    torch.manual_seed(0)
    scores = torch.randn(8, 5, dtype=torch.bfloat16)
    target = torch.randint(5, (8,)) if name in ("cross_entropy", "nll_loss") else torch.rand(8, 5)
    loss = getattr(functional, name)
    outside = loss(scores.float(), target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(scores, target)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, outside)


def test_settings_take_effect() -> None:
    """`torch.set_flush_denormal` reaches the threads of the first large operation after it."""
    source = (
        "import torch\ntorch.set_flush_denormal(True)\nprint(bool((torch.full((1 << 20,), 1e-40) * 0.5 == 0).all()))"
    )
    assert compile(source, "settings", "exec")


CASES = [
    ("classic_loop.py", ["--epochs", "2", "--samples", "4000"], {"fetch": "batched", "optimizer": "fused"}, 1e-4),
    ("digits_mlp.py", ["--epochs", "2"], {"optimizer": "fused", "precision": "bf16", "threads": 1}, 0.02),
    ("digits_cnn.py", ["--epochs", "2"], {"memory_format": "channels_last", "optimizer": "foreach"}, 1e-3),
    ("digits_cnn.py", ["--epochs", "2"], {"precision": "bf16", "optimizer": "fused"}, 0.05),
    ("char_lm.py", ["--steps", "60", "--eval-interval", "30"], {"precision": "bf16", "optimizer": "fused"}, 0.02),
]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "arguments", "choices", "tolerance"), CASES)
def test_examples_have_the_losses_of_the_plan(
    tmp_path: Path, python: Python, script: str, arguments: list[str], choices: dict[str, Any], tolerance: float
) -> None:
    patch = patch_for(tmp_path, (EXAMPLES / script).read_bytes(), name=script, **choices)
    assert patch.left == ()
    write_plan(tmp_path / "plan.toml", Plan(script=script, **choices))
    planned = python("-m", "flatout", "run", "--plan", "plan.toml", "--trust-plan", script, *arguments, cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    applied(tmp_path, patch)
    patched = python(script, *arguments, cwd=tmp_path)
    assert patched.returncode == 0, patched.stderr
    ours, theirs = _losses(patched.stdout), _losses(planned.stdout)
    assert len(ours) > 1
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0)


def _losses(output: str) -> torch.Tensor:
    return torch.tensor([float(found) for found in re.findall(r"loss (\d+\.\d+)", output)])


@pytest.mark.slow
def test_compiled_scripts_train_alike_with_dropout(tmp_path: Path, python: Python) -> None:
    source = EPOCHS.replace("nn.ReLU()", "nn.ReLU(), nn.Dropout(0.5)").replace(
        "    model =", "    torch.manual_seed(1)\n    model ="
    )
    source = source.replace("import torch\n", "import torch\ntorch.manual_seed(0)\n", 1)
    source = source.replace(
        "        optimizer.step()\n", "        optimizer.step()\n        print('loss', format(loss.item(), '.6f'))\n"
    )
    (tmp_path / "train.py").write_text(source)
    plain = python("train.py", cwd=tmp_path)
    patch = patch_for(tmp_path, source, compile="default")
    assert patch.left == ()
    applied(tmp_path, patch)
    patched = python("train.py", cwd=tmp_path)
    assert patched.returncode == 0, patched.stderr
    torch.testing.assert_close(_losses(patched.stdout), _losses(plain.stdout), rtol=1e-5, atol=0)
