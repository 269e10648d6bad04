"""flatout export: a model to files that run without its source, each verified against it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flatout.cli.streams import stdout_to_stderr
from flatout.errors import UsageError

if TYPE_CHECKING:
    from torch import nn


def export(
    model: Annotated[str, typer.Argument(help="file.py:name, package.module:name or a Hugging Face folder.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "--inputs",
            metavar="SPEC",
            help="An example input, as 'int64[2,16]<1000' or 'mask=bool[2,16]', or a .safetensors, .npz or .pt file; "
            "repeat for more. Default: what the model's function gives.",
        ),
    ] = None,
    format: Annotated[
        str, typer.Option(metavar="LIST", help="Of pt2, aoti, onnx, executorch, torchscript (legacy), with commas.")
    ] = "pt2",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the files; made if it is not there.")] = Path(
        "."
    ),
    name: Annotated[str, typer.Option(metavar="NAME", help="The files' name; default: the model's.")] = "",
    dynamic: Annotated[
        Literal["batch", "length", "none"], typer.Option(help="Sizes that may vary; with length the batch may too.")
    ] = "batch",
    allow_fixed: Annotated[
        bool, typer.Option("--allow-fixed", help="Export with the example's sizes where they cannot vary.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Largest difference, as a share of the output; default: by dtype."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Export a model to .pt2, AOTInductor, ONNX or ExecuTorch, and keep only files that reproduce its outputs.

    MODEL is an nn.Module, or a function that returns one or (module, example_inputs). Exit code: 0 all verified,
    1 something could not be exported (the report says why), 2 the model or the inputs cannot be used.
    """
    from flatout.infer.exporting.export import export as export_model
    from flatout.report.document import to_text
    from flatout.report.export_text import export_document, export_text

    if name and Path(name).name != name:
        limit = "it is the name of files in the folder of --out"
        raise UsageError(f"--name is {name}", limit=limit, remedy="leave the folders to --out")
    formats = [one.strip() for one in format.split(",") if one.strip()]
    with stdout_to_stderr():
        module, example = _model_and_inputs(model, inputs or [])
        report = export_model(
            module,
            example,
            _folder(out) / (name or _name(model)),
            format=formats,  # type: ignore[arg-type]
            dynamic=dynamic,
            allow_fixed=allow_fixed,
            tolerance=tolerance,
        )
    print(to_text(export_document(report)) if json else export_text(report))
    return 0 if report.ok else 1


def _model_and_inputs(model: str, specs: list[str]) -> tuple[nn.Module, object]:
    from flatout.infer.exporting.input_specs import FORM, example_inputs
    from flatout.infer.model_source import load_model

    module, given = load_model(model)
    if not specs and given is None:
        remedy = "pass --input, or name a function that returns (module, inputs)"
        raise UsageError(f"{model} comes without example inputs", limit=FORM, remedy=remedy)
    return module, example_inputs(module, specs) if specs else given


def _name(model: str) -> str:
    """'net.py:nets.small' -> 'small', './bert-base' -> 'bert-base'."""
    return model.rpartition(":")[2].rpartition(".")[2] if ":" in model else Path(model).resolve().name


def _folder(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {out}: {error.strerror}", remedy="name a folder that you may write") from error
    return out
