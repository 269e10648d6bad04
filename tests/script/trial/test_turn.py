"""Trials run steps in turn: one that starts waits with its first ones while another runs some."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="trials need Linux")


def test_one_has_the_turn(tmp_path: Path) -> None:
    from flatout.script.trial.session import Turn

    one, other, order = Turn(tmp_path), Turn(tmp_path), ["one"]
    one.take()
    one.take()

    def wait() -> None:
        other.take()
        order.append("other")

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.05)
    assert order == ["one"]
    one.leave()
    waiting.join(60)
    assert order == ["one", "other"]
    one.leave()
    other.leave()
    one.take()
    one.leave()


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.slow
def test_a_trial_waits_with_its_first_steps(tmp_path: Path) -> None:
    from flatout.script.entry import Target
    from flatout.script.trial.session import Turn
    from flatout.script.trial.setup import TrialSetup

    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "print('loaded', flush=True)\n"
        "while True:\n"
        "    loss = model(torch.ones(8, 4)).mean()\n"
        "    print('computed', flush=True)\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
    )
    setup = TrialSetup(target=Target(path=str(tmp_path / "train.py")), work_folder=tmp_path)
    turn = Turn(setup.shared_folder)
    turn.take()
    with setup.trial() as trial:
        trial.spawn()
        while trial.log_path.read_text() != "loaded\n":
            assert trial.alive
        threading.Event().wait(0.2)
        assert trial.log_path.read_text() == "loaded\n"
        turn.leave()
        trial.start()
        turn.take()  # it waits for commands
        turn.leave()
        assert len(trial.window([], settle=1, steps=2).seconds) == 2
        turn.take()
        turn.leave()
