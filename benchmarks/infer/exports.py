"""`python -m benchmarks.infer.exports`: models x formats: exported? what varies? how far off? how fast beside eager?

Each file is loaded as its reader would load it (torch.export.load, aoti_load_package, onnxruntime, torch.jit.load) and
called in turns with the module in eval mode without gradients; the ratio is that of paired samples (exact signed-rank
interval, 95 %). Above 1 the file is faster.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.infer.export_cases import CASES, Case
from flatout import export
from flatout.infer.exporting.report import ExportedFile, ExportReport
from flatout.machine.detect import detect
from flatout.statistics import compare_paired
from flatout.timing import interleave
from flatout.units import format_bytes, format_seconds

FORMATS = ("pt2", "aoti", "onnx", "torchscript")
COLUMNS = (
    f"{'model':<24} {'format':<12} {'exported':<9} {'varies':<14} {'difference':>10} {'size':>9} {'export':>8}  speed"
)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.infer.exports", description=__doc__)
    parser.add_argument("--only", nargs="+", help="parts of models' names")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, of TorchScript
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n{COLUMNS}")
    results = []
    for case in CASES:
        if not arguments.only or any(part.lower() in case.name.lower() for part in arguments.only):
            results += _rows(case, arguments.formats, arguments.rounds)
    _summarise(results)
    if arguments.out:
        document = {"benchmark": "infer_exports", "machine": detect().to_json(), "versions": _versions()}
        document["threads"] = torch.get_num_threads()
        arguments.out.write_text(json.dumps({**document, "results": results}, indent=1) + "\n")
    return 0


def _rows(case: Case, formats: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    try:
        model, example = case.make()
    except ImportError as error:
        print(f"{case.name:<24} not installed ({error})")
        return []
    with tempfile.TemporaryDirectory() as folder:
        report = export(model, example, f"{folder}/model", format=list(formats), dynamic=case.dynamic, allow_fixed=True)  # type: ignore[arg-type]
        speeds = _speeds(model.eval(), example, report, rounds)
    rows = []
    for file in report.files:
        # How each check went is in the checks; the path is gone with its folder.
        row = {"model": case.name, "expected": case.expected, **asdict(file), "speed": speeds.get(file.format)}
        row |= {"path": None, "bit_identical": file.bit_identical, "largest_difference": file.largest_difference}
        rows.append({**row, "parameters": report.parameters})
        print(_line(case, file, speeds.get(file.format)), flush=True)
    return rows


def _speeds(model: nn.Module, example: Any, report: ExportReport, rounds: int) -> dict[str, Any]:
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    runs: dict[str, Callable[[], Any]] = {"eager": lambda: model(*args, **kwargs)}
    for file in report.files:
        if file.path is not None:
            runs[file.format] = _reader(file, model, args, kwargs)
    with torch.no_grad():
        found = interleave(runs, rounds, max_seconds=60)
    base = found.pop("eager")
    return {
        name: {
            **asdict(compare_paired(base.samples_seconds, one.samples_seconds)),
            "eager_seconds": base.samples_seconds,
            "file_seconds": one.samples_seconds,
        }
        for name, one in found.items()
    }


def _reader(file: ExportedFile, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """The file as a user calls it."""
    path = str(file.path)
    if file.format == "onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        named = {**named, **named.pop("kwargs", {})}
        feed = {name: value.numpy() for name, value in named.items() if isinstance(value, Tensor)}
        return lambda: session.run(None, feed)
    if file.format == "aoti":
        loaded: Any = torch._inductor.aoti_load_package(path)
    else:
        loaded = torch.export.load(path).module() if file.format == "pt2" else torch.jit.load(path)
    return lambda: loaded(*args, **kwargs)


def _line(case: Case, file: ExportedFile, speed: dict[str, Any] | None) -> str:
    start = f"{case.name:<24} {file.format:<12} "
    if file.failure is not None:
        at = f" (at {file.failure.line})" if file.failure.line else ""
        return f"{start}{'no':<9} {file.failure.what}{at}"
    difference = "bit-identical" if file.bit_identical else f"{file.largest_difference:.1e}"
    varies = " ".join(file.dynamic) or "nothing"
    ratio = "" if speed is None else f"x{speed['ratio']:.2f} ({speed['low']:.2f} to {speed['high']:.2f})"
    size = format_bytes(file.bytes or 0)
    return f"{start}{'yes':<9} {varies:<14} {difference:>10} {size:>9} {format_seconds(file.seconds):>8}  {ratio}"


def _summarise(results: list[dict[str, Any]]) -> None:
    meant = [row for row in results if row["expected"]]
    good = [row for row in meant if row["failure"] is None]
    wrong = [row for row in results if not row["expected"] and row["failure"] is None and row["dynamic"]]
    varying = [row for row in good if "batch" in row["dynamic"]]
    print(f"\n{len(good)} of {len(meant)} exported and verified, {len(varying)} of them with a batch that varies")
    print(f"{len(wrong)} files with a varying batch for modules that cannot have one")


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("torch", "onnx", "onnxscript", "onnxruntime", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


if __name__ == "__main__":
    sys.exit(main())
