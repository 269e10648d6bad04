"""`flatout tune --fit` on scripts with optimizers that hold much: what is chosen under which limit, and what it costs.

    python -m benchmarks.memory.fit_script [--budget 120]

Each script is tuned under shares of what a plain step of it holds. A line each: the choices, the bytes that a fresh
process held, whether that is within the limit, the verdict on the numbers, and how many times as fast a step is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from flatout.errors import FlatoutError
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.script.entry import Target
from flatout.script.trial.setup import TrialSetup
from flatout.tuning.script_tuning import TuneRequest, tune_script
from flatout.units import format_bytes

LOOP = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential({layers})
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
while True:
    x, y = torch.randn(16, 256), torch.randint(0, 10, (16,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
"""
SCRIPTS = {
    "deep": "*[part for _ in range(8) for part in (nn.Linear(256, 256), nn.ReLU())], nn.Linear(256, 10)",
    "wide": "nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 10)",
}
SHARES = (0.95, 0.8, 0.65)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of each tune")
    budget_seconds = parser.parse_args().budget
    machine = machine_with_ceilings(lambda text: None)
    for name, layers in SCRIPTS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "train.py"
            path.write_text(LOOP.format(layers=layers))
            target = Target(path=str(path))
            plain_bytes = peak_of(target, Path(folder))
            for share in SHARES:
                limit_bytes = int(share * plain_bytes)
                request = TuneRequest(target=target, budget_seconds=budget_seconds, fit_bytes=limit_bytes)
                try:
                    found = tune_script(request, machine)
                except FlatoutError as error:
                    print(f"{name} in {share:.0%}: {error}", flush=True)
                    continue
                fit, proof, final = found.state.fit, found.proof, found.final
                held = "unknown" if fit is None or fit.planned_bytes is None else format_bytes(fit.planned_bytes)
                within = "within" if fit is not None and fit.holds else "NOT within"
                print(
                    f"{name} in {share:.0%}: {found.plan.choices()}, {format_bytes(plain_bytes)} -> {held}, {within} "
                    f"{format_bytes(limit_bytes)}, {proof.verdict if proof else 'nothing proved'}, "
                    f"{f'x{final.comparison.ratio:.2f}' if final else 'not timed'}, {found.seconds:.0f} s",
                    flush=True,
                )
    return 0


def peak_of(target: Target, folder: Path) -> int:
    """Bytes that a plain step's tensors hold."""
    with TrialSetup(target=target, work_folder=folder).trial() as trial:
        trial.start(120)
        found = trial.peak([]).peak_bytes
    assert found is not None
    return found


if __name__ == "__main__":
    sys.exit(main())
