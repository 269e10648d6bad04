"""What a run that died under its plan is told: the levers that act where it failed first, and commands that run."""

from __future__ import annotations

import pytest
import torch

from flatout.levers.autocast import Autocast
from flatout.levers.compile import Compile
from flatout.levers.fused_optimizer import FusedOptimizer
from flatout.levers.lever import Choice
from flatout.levers.threads import Threads
from flatout.script.failure import explain_failure, place_of_failure

CHOICES = [Choice(Threads(), 2), Choice(FusedOptimizer(), "fused"), Choice(Autocast(), "bf16")]


def died(run: object) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        run()  # type: ignore[operator]
    return caught.value


def test_the_lever_that_acts_there_comes_first() -> None:
    forward = died(lambda: torch.nn.Linear(2, 3)(torch.ones(5)))
    message = explain_failure(forward, CHOICES, {"--plan": "my plan.toml", "--without": "compile"}, ["train.py", "-x"])
    assert message.splitlines() == [
        "flatout: the script failed in the model under its plan (bf16 autocast, threads 2, fused optimizer). "
        "If the plan is the cause, run",
        "    flatout run --plan 'my plan.toml' --without compile,precision train.py -x    (without bf16 autocast)",
        "    flatout run --no-plan train.py -x    (without the plan)",
    ]
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.ones(3)
    assert "(fused optimizer, bf16" in explain_failure(died(optimizer.step), CHOICES, {}, ["t.py"])


def test_of_errors_in_compiled_code_the_compiler_is_suspected() -> None:
    choices = [*CHOICES, Choice(Compile(), "default")]
    compiled = torch.compile(lambda x: torch.mm(x, x), backend="eager", fullgraph=True)
    message = explain_failure(died(lambda: compiled(torch.ones(2, 3))), choices, {"--quiet": ""}, ["-m", "a.b"])
    assert "(torch.compile, bf16 autocast" in message
    assert "flatout run --no-plan --quiet -m a.b " in message
    options = {"--device": "cpu", "--plan": "p.toml", "--trust-plan": "", "--deterministic": ""}
    message = explain_failure(died(lambda: compiled(torch.ones(2, 3))), choices, options, ["t.py"])
    assert "flatout run --no-plan --device cpu --deterministic t.py " in message


def test_without_a_lever_there_is_nothing_to_say() -> None:
    assert explain_failure(RuntimeError(), [], {}, ["train.py"]) == ""
    assert place_of_failure(["/home/me/train.py"]) == ""
