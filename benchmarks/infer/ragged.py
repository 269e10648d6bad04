"""`python -m benchmarks.infer.ragged`: 100,000 ragged inputs through `flatout predict`, killed by SIGKILL on the way.

Lengths are log-normal from 1 to 512 tokens (mean about 45). The command runs three times on the same file: whole;
killed at some moment; gone on with until the end. Said of it:

    memory    the largest resident size of the process while it ran, over that when its first result was there
    order     line n of the results is of input n, and they are those that the inputs give alone (a sample is checked)
    resumed   the lines of the killed and resumed run beside those of the whole run
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.infer.turns import versions, write
from flatout.models import Bert, BertConfig

WORDS, LONGEST = 1000, 512
CHECKED = 200


def model() -> Bert:
    """Small, so that 100,000 inputs take a minute or two; what is shown does not depend on its size."""
    torch.manual_seed(0)
    return Bert(BertConfig(vocab_size=WORDS, max_tokens=LONGEST, width=64, heads=2, layers=2))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.infer.ragged", description=__doc__)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = _write_inputs(folder / "in.jsonl", arguments.items)
        whole = _run(folder, "whole.jsonl")
        killed = _run(folder, "cut.jsonl", kill_after=arguments.items // 3)
        resumed = _run(folder, "cut.jsonl")
        found = {**_compared(folder, inputs), "whole": whole, "killed": killed, "resumed": resumed}
    growth = (whole["peak_bytes"] - whole["first_result_bytes"]) / 2**20
    print(
        f"{arguments.items} inputs, {sum(map(len, inputs)) / len(inputs):.0f} tokens on average: "
        f"{whole['figures']['seconds']:.0f} s, {whole['figures']['tokens_per_second']:,.0f} tokens/s, "
        f"padding {whole['figures']['padding_share']:.1%}"
    )
    print(f"memory   {growth:+.0f} MiB above the first result's {whole['first_result_bytes'] / 2**20:.0f} MiB")
    print(
        f"order    {found['out_of_order']} lines out of place; {found['checked']} checked alone, "
        f"largest difference {found['largest_difference']:.1e}"
    )
    print(
        f"resumed  killed after {killed['lines']} lines; {found['different_lines']} of {arguments.items} lines "
        f"differ from the whole run by more than 1e-4"
    )
    write(
        arguments.out,
        {
            "benchmark": "infer_ragged",
            "versions": versions("flatout"),
            "items": arguments.items,
            "growth_bytes": whole["peak_bytes"] - whole["first_result_bytes"],
            **found,
        },
    )
    return 0


def _write_inputs(path: Path, items: int) -> list[list[int]]:
    draw = random.Random(0)
    lengths = [min(LONGEST, max(1, round(draw.lognormvariate(3.4, 0.9)))) for _ in range(items)]
    inputs = [[draw.randrange(WORDS) for _ in range(length)] for length in lengths]
    with path.open("w") as file:
        file.writelines(json.dumps(one) + "\n" for one in inputs)
    return inputs


def _run(folder: Path, out: str, kill_after: int | None = None) -> dict[str, Any]:
    words = ["predict", "benchmarks.infer.ragged:model", str(folder / "in.jsonl"), "--out", str(folder / out)]
    command = [sys.executable, "-m", "flatout", *words, "--keep", "pooled", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."})
    seen = psutil.Process(process.pid)
    first = peak = 0
    while process.poll() is None:
        time.sleep(0.05)
        try:
            held = seen.memory_info().rss
        except psutil.Error:
            break
        size = (folder / out).stat().st_size if (folder / out).exists() else 0
        if size and not first:
            first = held
        peak = max(peak, held)
        if kill_after is not None and size and _lines(folder / out) >= kill_after:
            process.send_signal(signal.SIGKILL)
            break
    text, _ = process.communicate()
    document = json.loads(text) if text.strip() else {}
    return {
        "exit_code": process.returncode,
        "lines": _lines(folder / out),
        "first_result_bytes": first,
        "peak_bytes": peak,
        "figures": document.get("figures"),
        "done_before": document.get("done_before"),
    }


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _compared(folder: Path, inputs: list[list[int]]) -> dict[str, Any]:
    wrong = different = 0
    largest = 0.0
    checked = set(random.Random(1).sample(range(len(inputs)), min(CHECKED, len(inputs))))
    alone = model().eval()
    with (folder / "whole.jsonl").open() as whole, (folder / "cut.jsonl").open() as cut:
        for index, (line, other) in enumerate(zip(whole, cut, strict=True)):
            a, b = json.loads(line), json.loads(other)
            wrong += a["index"] != index or b["index"] != index
            found = torch.tensor(a["output"])
            different += not torch.allclose(found, torch.tensor(b["output"]), atol=1e-4)
            if index in checked:
                with torch.no_grad():
                    right = alone(torch.tensor([inputs[index]])).pooled
                assert right is not None
                largest = max(largest, float((found - right[0]).abs().max()))
    return {"out_of_order": wrong, "different_lines": different, "checked": len(checked), "largest_difference": largest}


if __name__ == "__main__":
    sys.exit(main())
