"""flatout tune-inference: the fastest way to serve a model that is near enough to fp32, measured on a sample."""

from __future__ import annotations

import shlex
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import typer

from flatout.cli.shared_options import ExactnessOption, check_place, files_of_models
from flatout.cli.streams import progress_line, stdout_to_stderr
from flatout.errors import UsageError
from flatout.terminal import tell
from flatout.whole_files import check_no_input

MOST_ITEMS = 4096


def tune_inference(
    model: Annotated[str, typer.Argument(help="file.py:name, package.module:name or a Hugging Face folder.")],
    inputs: Annotated[
        Path, typer.Argument(help="A sample: .npy, .npz, .safetensors or .jsonl of tokens, or .txt of texts.")
    ],
    task: Annotated[
        Literal["predict", "generate"] | None, typer.Option(help="Default: guessed from model and sample.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the plan goes.")] = Path("flatout-inference.toml"),
    items: Annotated[
        int | None, typer.Option(metavar="N", help="How many inputs will be served, to weigh start-up costs against.")
    ] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="How long it may take: 90s, 5m.")] = "5m",
    exactness: ExactnessOption = "reduced",
    max_error: Annotated[
        float, typer.Option(metavar="SHARE", help="Largest error against fp32, as a share of the outputs' spread.")
    ] = 0.05,
    min_agreement: Annotated[
        float, typer.Option(metavar="SHARE", help="Least share of answers (classes, tokens) as good as fp32's.")
    ] = 0.99,
    max_divergence: Annotated[
        float, typer.Option(metavar="NATS", help="Largest mean divergence of the answers' distribution.")
    ] = 0.01,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="For generate: tokens for each prompt.")] = 64,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="SPEC", help="For texts: a folder or file.py:name; default: the model's.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Choices that are already made; others are tried on top.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1; default: the model's.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Find the fastest way to run a model whose outputs on a sample stay close enough to fp32; write the plan.

    `flatout predict` and `flatout generate` take it with --plan. Exit code: 0 done, 2 the model or the sample cannot
    be used.
    """
    from flatout.infer.choosing.tune_inference import tune_inference as tune
    from flatout.infer.model_source import load_model
    from flatout.plan import read_plan, write_plan
    from flatout.report.document import document, to_text
    from flatout.tuning.short_budget import budget_option
    from flatout.units import parse_seconds

    seconds, base = parse_seconds(budget), None if plan is None else read_plan(plan)
    check_place(out)
    check_no_input(out, [inputs, *files_of_models(model, tokenizer)], "the plan")
    with stdout_to_stderr(), progress_line() as progress:
        sample = _sample(inputs, model, tokenizer)
        module, _ = load_model(model, device)
        found = tune(
            module,
            sample,
            task=task,
            plan=base,
            items=items,
            exactness=exactness,
            max_error=max_error,
            min_agreement=min_agreement,
            max_divergence=max_divergence,
            seconds=seconds,
            max_new_tokens=max_new_tokens,
            progress=progress,
        )
    try:
        write_plan(out, found.plan)  # first: printing may fail, as into a closed pipe
    except UsageError:
        tell(f"the plan could not be saved; here it is:\n\n{found.plan.to_toml()}")
        raise
    print(to_text(document("tune-inference", found.to_json())) if json else found.summary(budget_option))
    if not json:
        given = shlex.quote(str(inputs))
        more = f"--prompts {given}" if found.task == "generate" else f"{given} --out RESULTS.jsonl"
        options = {"--tokenizer": tokenizer, "--plan": str(out), "--device": device}
        there = "".join(f" {name} {shlex.quote(value)}" for name, value in options.items() if value is not None)
        command = f"flatout {found.task} {shlex.quote(model)} {more}{there}"
        print(f"{'saved':<10}{out}      next: {command}")
    return 0


def _sample(path: Path, model: str, tokenizer: str | None) -> list[object]:
    import numpy as np
    import torch

    from flatout.infer.input_files import open_inputs
    from flatout.infer.tokenizer_source import encode_of, load_tokenizer, tokenizer_beside

    words = load_tokenizer(tokenizer) if tokenizer is not None else tokenizer_beside(model)
    found = []
    source = open_inputs(path, None if words is None else encode_of(words))
    for number, value in enumerate(islice(source.begin(0), MOST_ITEMS), 1):
        if isinstance(value, UsageError):
            raise UsageError(f"{path}, line {number}: {value.what}", limit=value.limit, remedy=value.remedy) from value
        if isinstance(value, Exception):
            raise value
        if isinstance(value, list) and not value:  # a blank line: generate skips it too
            continue
        found.append(torch.from_numpy(value) if isinstance(value, np.ndarray) else value)
    return found
