"""What stands between a backward pass and the optimizer's step, read from the source of what runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.levers.call_site import FoundSite, _named, after_backward, before_step

HEAD = """
import contextlib, torch
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
other = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
def loss():
    return net(torch.ones(2)).sum()
"""


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, FoundSite]]]:
    """What is found at each backward pass and at the end of each optimizer's step."""
    found: list[tuple[str, FoundSite]] = []
    engine: Any = torch.autograd.graph._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        found.append(("backward", after_backward(sys._getframe(1))))
        return engine(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", backward)

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        found.append(("step", before_step(sys._getframe(1))))

    handle = register_optimizer_step_post_hook(stepped)
    yield found
    handle.remove()


def run(folder: Path, body: str, name: str = "__main__") -> dict[str, Any]:
    path = folder / "train.py"
    path.write_text(HEAD + body)
    space: dict[str, Any] = {"__name__": name}
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), space)
    return space


FOLLOWED = {
    "at the top": "loss().backward()\noptimizer.step()\n",
    "with arguments": "loss().backward(retain_graph=False)\noptimizer.step()\n",
    "by a function": "torch.autograd.backward(loss())\noptimizer.step()\n",
    "in a loop": "for _ in range(1):\n    optimizer.zero_grad()\n    loss().backward()\n    optimizer.step()\n",
    "an attribute": (
        "class Trainer:\n    def __init__(self):\n        self.optimizer = optimizer\n"
        "    def go(self):\n        loss().backward()\n        self.optimizer.step()\nTrainer().go()\n"
    ),
    "a closed-over name": (
        "def outer(mine):\n    def go():\n        loss().backward()\n        mine.step()\n    go()\nouter(optimizer)\n"
    ),
    "Ctrl-C is caught": (
        "try:\n    loss().backward()\n    optimizer.step()\nexcept (KeyboardInterrupt, SystemExit):\n    pass\n"
    ),
    "in a handler": "try:\n    1 / 0\nexcept ArithmeticError:\n    loss().backward()\n    optimizer.step()\n",
    "in a context": "with contextlib.nullcontext():\n    loss().backward()\n    optimizer.step()\n",
}


@pytest.mark.parametrize("body", FOLLOWED.values(), ids=FOLLOWED)
def test_a_step_directly_after_backward(tmp_path: Path, body: str, sites: list[tuple[str, FoundSite]]) -> None:
    space = run(tmp_path, body)
    assert [kind for kind, _ in sites] == ["backward", "step"]
    for _, site in sites:
        assert (site.obstacle, site.optimizers) == ("", (space["optimizer"],))


def test_several_optimizers_a_schedule_and_what_is_freed_next(
    tmp_path: Path, sites: list[tuple[str, FoundSite]]
) -> None:
    space = run(
        tmp_path,
        "loss().backward()\noptimizer.step()\nother.step()\nscheduler.step()\nnet.zero_grad()\nother.zero_grad()\n",
    )
    for _, site in sites:
        assert site.optimizers == (space["optimizer"], space["other"])
        assert site.zeroed == (space["net"], space["other"])


def test_a_librarys_file_is_named_with_the_library() -> None:
    assert _named("/a/train.py") == "train.py"
    assert _named("/env/lib/python3.11/site-packages/click/core.py") == "click's core.py"
    assert _named(contextlib.__file__) == "Python's contextlib.py"


NOT_FOLLOWED = {
    "loss().backward()\nif True:\n    optimizer.step()\n": "train.py:9: backward() is followed by `if True:`",
    "for _ in range(2):\n    loss().backward()\noptimizer.step()\n": "followed by the end of its block",
    "loss().backward()\nloss().backward()\noptimizer.step()\n": "followed by `loss().backward()`",
    "loss().backward()\ntorch.nn.utils.clip_grad_norm_(net.parameters(), 1)\noptimizer.step()\n": "`torch.nn.utils.",
    "optimizer.step()\nloss().backward()\nscheduler.step()\noptimizer.step()\n": "scheduler.step() follows",
    "loss().backward()\noptimizer.step(None)\n": "`optimizer.step(None)`",
    "loss().backward()\nlambda: optimizer\n[optimizer][0].step()\n": "followed by `lambda: optimizer`",
    "loss().backward()\n[optimizer][0].step()\n": "followed by `[optimizer][0].step()`",
    "loss().backward(), optimizer.step()\n": "backward() is not a statement of its own",
    "def go():\n    it = loss()\n    it.backward()\n    return it\noptimizer.step(go)\n": "by `return",
    "try:\n    loss().backward()\n    optimizer.step()\nexcept RuntimeError:\n    pass\n": "train.py:9: what a",
    "def go():\n    loss().backward()\n    optimizer.step()\ntry:\n    go()\nexcept:\n    pass\n": "py:12: what a",
    "try:\n    loss().backward()\n    optimizer.step()\nfinally:\n    pass\n": "is handled there",
    "with contextlib.suppress(ValueError):\n    loss().backward()\n    optimizer.step()\n": "suppressed there",
}


@pytest.mark.parametrize(("body", "why"), NOT_FOLLOWED.items())
def test_anything_else_is_named(tmp_path: Path, body: str, why: str, sites: list[tuple[str, FoundSite]]) -> None:
    run(tmp_path, body)
    first = next(site for kind, site in sites if kind == "backward")
    assert why in first.obstacle
    assert first.optimizers == ()


def test_a_step_without_its_backward_pass_before_it(tmp_path: Path, sites: list[tuple[str, FoundSite]]) -> None:
    run(tmp_path, "loss().backward()\nprint('')\noptimizer.step()\n")
    assert "`print('')` comes before the optimizer's step" in sites[-1][1].obstacle
    sites.clear()
    run(tmp_path, "def go():\n    optimizer.step()\ngo()\n")
    assert "the optimizer's step comes first in its block" in sites[0][1].obstacle


def test_a_file_that_was_edited_since_is_not_believed(tmp_path: Path, sites: list[tuple[str, FoundSite]]) -> None:
    path = tmp_path / "edited.py"
    other = HEAD + "loss().backward()\nprint('')\noptimizer.step()\n"
    code = compile(other, str(path), "exec", dont_inherit=True)
    path.write_text(HEAD + "loss().backward()\noptimizer.step()\n")
    exec(code, {"__name__": "__main__"})
    assert "edited.py cannot be read, or is not what runs" in sites[0][1].obstacle
    path.unlink()
    text = compile("import torch\ntorch.ones(1, requires_grad=True).backward()", "<text>", "exec")
    exec(text, {"__name__": "__main__"})
    assert "the source of <text> cannot be read" in sites[-1][1].obstacle


def test_outside_of_a_script_nobody_knows_who_catches(tmp_path: Path, sites: list[tuple[str, FoundSite]]) -> None:
    run(tmp_path, "loss().backward()\noptimizer.step()\n", name="a_module")
    assert sites[0][1].obstacle
