"""flatout generate: text from a language model, at a stated share of what this machine can do."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO  # Any: settings of several types

import typer

from flatout.cli.shared_options import check_place, files_of_models, plan_with
from flatout.cli.streams import stdout_to_stderr
from flatout.errors import UsageError
from flatout.terminal import tell
from flatout.whole_files import check_no_input

if TYPE_CHECKING:
    from torch import nn

    from flatout.infer.generation.generated import Generation, Piece
    from flatout.infer.generation.token_generator import TokenGenerator
    from flatout.infer.tokenizer_source import Tokenizer
    from flatout.plan import Plan

_PROMPT_KEYS = ("prompt", "text", "input_ids")
"""Of a line that is a JSON object."""

ModelArgument = Annotated[str, typer.Argument(help="file.py:name, package.module:name or a Hugging Face folder.")]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='A prompt a line: a text, or in .jsonl also ids or {"prompt": ...}; or .npy, .npz, .safetensors of ids.',
    ),
]
TokenizerOption = Annotated[
    str | None, typer.Option(metavar="SPEC", help="file.py:name or a folder; default: that of the model's folder.")
]
PlanFile = Annotated[Path | None, typer.Option(metavar="FILE", help="A plan; the options below override it.")]
DraftOption = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Speculate with this smaller model; the distribution stays the same."),
]
StopOption = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Stop at this text (or ids, as '12,7'); repeat for more.")
]

MostTokens = Annotated[
    int | None,
    typer.Option(metavar="N", help="At most this many tokens per prompt; default: the model's own, else 64."),
]
TemperatureOption = Annotated[
    float | None, typer.Option(metavar="T", help="0 = greedy; default: as the model's generation_config, else 0.")
]
StartOption = Annotated[
    int | None, typer.Option(metavar="ID", help="First token of an encoder-decoder's output; default: the model's.")
]
PenaltyOption = Annotated[float | None, typer.Option(metavar="X", help="Above 1: seen tokens become less likely.")]


def generate(
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="A text, or token ids as '12,7,512' where there is no tokenizer; repeat for more."
        ),
    ] = None,
    prompts: PromptsFile = None,
    tokenizer: TokenizerOption = None,
    max_new_tokens: MostTokens = None,
    plan: PlanFile = None,
    precision: Annotated[Literal["fp32", "bf16"] | None, typer.Option(help="Of the weights.")] = None,
    weights: Annotated[Literal["int8", "int4"] | None, typer.Option(help="Of linear layers.")] = None,
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Speculate from the text so far; rounding aside, the text stays the same.")
    ] = False,
    draft: DraftOption = None,
    temperature: TemperatureOption = None,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Only the K most probable tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Only the most probable tokens whose probabilities add up to P.")
    ] = None,
    repetition_penalty: PenaltyOption = None,
    no_repeat_ngram: Annotated[int | None, typer.Option(metavar="N", help="Never repeat a run of N tokens.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the sampling.")] = None,
    stop: StopOption = None,
    decoder_start_token_id: StartOption = None,
    slots: Annotated[int | None, typer.Option(metavar="N", help="Texts generated at once.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1; default: the model's.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON lines, one per prompt.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Generate text. A single prompt's text is shown as it comes; figures go to stderr.

    Exit code: 0 generated, 1 the model produced NaN, 2 the model, a prompt or an option cannot be
    used.
    """
    from flatout.report.document import to_text
    from flatout.report.inference_text import generation_document

    if out is not None:
        check_place(out)
        check_no_input(out, [*filter(None, (prompts, plan)), *files_of_models(model, draft, tokenizer)], "the texts")
    guesses = "lookup" if lookup else None
    chosen = plan_with(plan, precision=precision, weights=weights, speculation=guesses)
    generator = _generator(model, tokenizer, chosen, draft, slots, device)
    has_words = generator.tokenizer is not None
    given = _prompts(prompt or [], prompts, has_tokenizer=has_words)
    settings: dict[str, object] = {  # arguments of generate, each of its type
        "stop": [_text_or_ids(one, has_words) for one in stop or []] or None,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "no_repeat_ngram": no_repeat_ngram,
        "seed": seed,
        "decoder_start_token_id": decoder_start_token_id,
    }
    made = _made(generator, given, max_new_tokens, settings, shown=not json and out is None)
    if json:
        print(to_text(generation_document(made)))
    if out is not None:
        _write(out, made, printed=json)
    tell(made.summary())
    return 0


def _made(
    generator: TokenGenerator, given: list[object], max_new_tokens: int | None, settings: dict[str, Any], *, shown: bool
) -> Generation:
    """The texts; one alone is shown as it comes, several when all are there, with a bar meanwhile."""
    from flatout.infer.progress_bar import progress_bar
    from flatout.report.inference_text import generation_text

    alone, stdout = len(given) == 1, sys.stdout
    streamed = alone and shown
    with (
        progress_bar(len(given), shown=not alone) as bar,
        # What the model's own code prints is not our text; pieces of that need the descriptor meanwhile.
        contextlib.redirect_stdout(sys.stderr) if streamed else stdout_to_stderr(),
    ):
        made = generator.generate(
            given,
            max_new_tokens=max_new_tokens,
            **settings,
            progress=lambda ended, tokens: bar(ended, f"{tokens} tokens"),
            pieces=(lambda piece: _show(piece, stdout)) if streamed else None,
        )
    if shown:
        print("" if alone else generation_text(made))
    return made


def _write(out: Path, made: Generation, *, printed: bool) -> None:
    """Where it cannot be written, the texts that were made are printed."""
    from flatout.report.inference_text import generation_text, write_lines

    try:
        write_lines(out, made)
    except UsageError:
        if not printed:
            print(generation_text(made))
        raise


def _generator(
    model: str, tokenizer: str | None, plan: Plan, draft: str | None, slots: int | None, device: str | None
) -> TokenGenerator:
    from flatout.infer.generation.token_generator import TokenGenerator

    with stdout_to_stderr():  # what the model's own code prints is not our text
        network, words = _model(model, tokenizer, device)
        smaller = None if draft is None else _model(draft, None, device)[0]
        return TokenGenerator(network, plan, tokenizer=words, draft=smaller, slots=slots)


def _model(spec: str, tokenizer: str | None, device: str | None) -> tuple[nn.Module, Tokenizer | None]:
    from flatout.infer.model_source import load_model
    from flatout.infer.tokenizer_source import load_tokenizer, tokenizer_beside

    network, _ = load_model(spec, device)
    return network, tokenizer_beside(spec) if tokenizer is None else load_tokenizer(tokenizer)


def _prompts(texts: list[str], file: Path | None, *, has_tokenizer: bool) -> list[object]:
    import json

    from flatout.infer.input_files import ARRAYS, open_inputs
    from flatout.plan_document import short

    given: list[object] = [_text_or_ids(one, has_tokenizer) for one in texts]
    if file is None:
        if not given:
            raise UsageError("there is no prompt", remedy="pass --prompt TEXT or --prompts FILE")
        return given
    if file.suffix in ARRAYS:
        return [*given, *open_inputs(file).begin(0)]
    try:
        # A text may hold other separators of lines; and some editors begin a file with a mark.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}", limit="prompts are lines of UTF-8 text") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if file.suffix != ".jsonl":
            given.append(_text_or_ids(line, has_tokenizer))
            continue
        where = f"{file}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where} is not JSON: {error}") from error
        except RecursionError as error:
            raise UsageError(f"{where} is nested too deeply", limit="a prompt is a text, or a list of ids") from error
        value = _prompt_in(value, where) if isinstance(value, dict) else value
        if not isinstance(value, str | list):  # numbers of several lines would be taken for the ids of one prompt
            raise UsageError(f"{where} is {short(value)}", limit="a prompt is a text, or a list of ids")
        given.append(value)
    return given


def _prompt_in(line: dict[str, object], where: str) -> object:
    for name in _PROMPT_KEYS:
        if name in line:
            return line[name]
    has = ", ".join(map(repr, line)) or "no keys"
    raise UsageError(f"{where} has {has}", limit=f"a prompt is under {', '.join(map(repr, _PROMPT_KEYS))}")


def _text_or_ids(text: str, has_tokenizer: bool) -> str | list[int]:
    """Ids only where there is no tokenizer: a text may well be '12,7'."""
    if has_tokenizer:
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        what = f"{text!r} is a text and there is no tokenizer"
        remedy = "pass --tokenizer file.py:name, or token ids as '12,7,512'"
        raise UsageError(what, limit="a model reads token ids", remedy=remedy) from None


def _show(piece: Piece, stdout: TextIO) -> None:
    text = piece.text if piece.text is not None else "".join(f"{token} " for token in piece.tokens)
    print(text, end="", flush=True, file=stdout)
