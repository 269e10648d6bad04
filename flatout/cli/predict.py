"""flatout predict: a model over a file of inputs, results in their order, a killed run goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flatout.cli.shared_options import plan_with
from flatout.cli.streams import stdout_to_stderr
from flatout.terminal import tell

if TYPE_CHECKING:
    from flatout.infer.input_files import Encode

FAILURES_SHOWN = 5


def predict(
    model: Annotated[str, typer.Argument(help="file.py:name, package.module:name or a Hugging Face folder.")],
    inputs: Annotated[Path, typer.Argument(help=".npy, .npz, .safetensors or .jsonl of tokens, or .txt of texts.")],
    out: Annotated[Path, typer.Option(metavar="PLACE", help="NAME.jsonl, or a folder of safetensors.")],
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="A plan; the options below override it.")] = None,
    precision: Annotated[Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="Of the weights.")] = None,
    weights: Annotated[Literal["int8", "int4"] | None, typer.Option(help="Of linear layers.")] = None,
    activations: Annotated[Literal["int8"] | None, typer.Option(help="int8: matrix products in int8.")] = None,
    batching: Annotated[
        Literal["packed", "equal", "padded"] | None, typer.Option(help="How texts of different lengths share a batch.")
    ] = None,
    batch_tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens of one batch.")] = None,
    batch_size: Annotated[int | None, typer.Option(metavar="N", help="Inputs of fixed size in one batch.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1; default: the model's.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="SPEC", help="For texts: a folder or file.py:name; default: the model's.")
    ] = None,
    keep: Annotated[str, typer.Option(metavar="NAME", help="Write only this part of the output, as 'pooled'.")] = "",
    check_finite: Annotated[
        bool, typer.Option("--check-finite", help="Count an output with inf or NaN as failed.")
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard existing results and start again.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Run a model over a file of inputs; an interrupted run resumes where it stopped.

    Exit code: 0 all inputs have a result, 1 some could not be used (the others have theirs), 2 model, inputs or plan
    cannot be used.
    """
    from flatout.infer.input_files import open_inputs
    from flatout.infer.model_source import load_model
    from flatout.infer.prediction.predict import Predictor
    from flatout.infer.prediction.predicted import Failed
    from flatout.infer.prediction.result_files import open_results, run_identity
    from flatout.report.document import to_text
    from flatout.report.inference_text import predict_document, predict_text

    options = {"precision": precision, "weights": weights, "activations": activations}
    chosen = plan_with(plan, **options, batching=batching, batch_tokens=batch_tokens)
    with stdout_to_stderr():  # what the model's own code prints is not our document
        source = open_inputs(inputs, _encode(model, tokenizer))
        module, _ = load_model(model)
        of = run_identity(model, module, inputs, chosen, tokenizer=tokenizer, keep=keep, check_finite=check_finite)
        # It may prepare the weights in place.
        predictor = Predictor(module, chosen, batch_size=batch_size, device=device, check_finite=check_finite)
        results = open_results(out, of, restart=restart, keep=keep, warn=lambda text: tell(f"warning: {text}"))
        before = results.done
        failures: list[str] = []
        predictions = predictor(source.begin(before), first_index=before, progress=True, total=source.count - before)
        try:
            for index, result in enumerate(predictions, start=before):
                results.add(index, result)
                if isinstance(result, Failed) and len(failures) < FAILURES_SHOWN:
                    failures.append(str(result))
        finally:
            results.close()
    tell(*failures)
    figures, place, failed = predictions.figures, str(out), results.failed
    if json:
        print(to_text(predict_document(figures, first=failures, out=place, done_before=before, failed=failed)))
    else:
        print(predict_text(figures, out=place, done_before=before, failed=failed))
    return 1 if results.failed else 0


def _encode(model: str, tokenizer: str | None) -> Encode | None:
    from flatout.infer.tokenizer_source import encode_of, load_tokenizer, tokenizer_beside

    found = load_tokenizer(tokenizer) if tokenizer is not None else tokenizer_beside(model)
    return None if found is None else encode_of(found)
