"""The tables of benchmarks/results/*.json in the pages: `python -m docs.generate` fills them in.

In a page

    <!-- table: gain gain_xeon_2_cores.json -->
    <!-- end of table -->

is a region for the table that `gain` makes of that file. A pattern such as `search_planted_*.json` takes every file
that matches. Each function here makes one kind of table; what it leaves out of a file, such as rows that no page
discusses, it leaves out by name. Processor, torch version and date are those that the file itself states.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from flatout.bench.claim import ClaimsResult
from flatout.bench.results import BenchResult
from flatout.report.bench_text import measured_text
from flatout.units import format_bytes, format_seconds

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
COLUMNS = 120
"""Of prose in the pages; tables may be wider."""
REGION = re.compile(r"<!-- table: (\w+) ([^>]+?) -->\n(.*?)<!-- end of table -->", re.DOTALL)

Document = dict[str, Any]


def filled(page: str) -> str:
    """The page with what the results give in each of its regions.

    ValueError: a region has no end, its kind of table is unknown, or it names a file that does not exist.
    """
    regions = len(REGION.findall(page))
    if not regions == page.count("<!-- table:") == page.count("<!-- end of table -->"):
        raise ValueError("a region is '<!-- table: KIND FILE ... -->' up to '<!-- end of table -->'")
    return REGION.sub(_region, page)


def _region(found: re.Match[str]) -> str:
    kind, names = found[1], found[2]
    if kind not in TABLES:
        raise ValueError(f"no table {kind!r}: there are {', '.join(TABLES)}")
    table = TABLES[kind](*documents(names.split()))
    return f"<!-- table: {kind} {names} -->\n\n{table}\n\n<!-- end of table -->"


def documents(names: Iterable[str]) -> list[Document]:
    """Of the files in benchmarks/results, those of a pattern in the order of their names."""
    paths = []
    for name in names:
        matching = sorted(RESULTS.glob(name))
        if not matching:
            raise ValueError(f"no file benchmarks/results/{name}")
        paths += matching
    return [json.loads(path.read_text()) for path in paths]


# the machine, and numbers as text

ARCHITECTURES = {"AuthenticAMD-25-17": "Zen 4", "AuthenticAMD-26-2": "Zen 5"}
"""Maker, family and model of the processors of the results."""
UNITS = {"avx512_bf16": "AVX-512 bf16", "avx512_fp16": "AVX-512 fp16", "amx_bf16": "AMX"}


def machine(document: Document) -> str:
    """Processor or GPU, torch version, and when Flatout measured the machine's ceilings, as far as the file says."""
    found = document["machine"]
    if "processor" in found:
        return f"{_short(found['processor'])}, torch {found['torch']}"
    cpu = found["cpu"]
    maker_family_model = cpu["model_id"].rpartition("-")[0]
    details = [ARCHITECTURES.get(maker_family_model), *(UNITS[one] for one in UNITS if one in cpu["features"])]
    processor = f"{_short(cpu['name'])} ({', '.join(filter(None, details))})"
    gpus = Counter(gpu["name"] for gpu in found["devices"])
    words = [
        *(f"{count} x {name}" if count > 1 else name for name, count in gpus.items()),
        processor,
        f"torch {found['versions']['torch']}",
    ]
    if found["ceilings"]:
        words.append(f"ceilings measured on {found['ceilings']['measured_at'][:10]}")
    return ", ".join(words)


def above(document: Document, more: str = "") -> str:
    """The machine and the file's own note, for the line above a table."""
    note = document.get("note")
    return f"{machine(document)}{more}. {note}" if note else f"{machine(document)}{more}:"


def _notes(results: Iterable[Document]) -> str:
    """Of tables that have the machines in their rows."""
    return " ".join(above(document) for document in results if "note" in document)


def _short(processor: str) -> str:
    return processor.replace("(R)", "").removesuffix(" Processor")


def ratio(found: Document) -> str:
    """x2.09 (2.01–2.18): a speed-up and its interval, or the number of pairs where they are too few for one."""
    decimals = 2 if found["ratio"] < 10 else 1
    speedup, low, high = (f"{found[bound] or 0.0:.{decimals}f}" for bound in ("ratio", "low", "high"))
    if found["high"] is None or not math.isfinite(found["high"]):
        return f"x{speedup} ({found['pairs']} pairs, no interval)"
    return f"x{speedup} ({low}–{high})"


def percent(share: float) -> str:
    """Two figures, no more than two decimals: 74 %, 3.0 %, 0.03 %, 0 %."""
    value = 100 * share
    if value == 0:
        return "0 %"
    return f"{value:.{0 if abs(value) >= 9.95 else 1 if abs(value) >= 0.995 else 2}f} %"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (header, *rows)]
    first = [*textwrap.wrap(caption, COLUMNS), ""] if caption else []
    return "\n".join([*first, lines[0], "|" + "--|" * len(header), *lines[1:]])


# training scripts

SCRIPTS = {
    "word_language_model": "pytorch/examples word_language_model",
    "vae": "pytorch/examples vae",
    "mnist": "pytorch/examples mnist",
    "mingpt_adder": "karpathy/minGPT adder",
    "nanogpt": "karpathy/nanoGPT (characters)",
    "makemore": "karpathy/makemore",
    "yunjey_language_model": "yunjey language_model",
    "yunjey_resnet": "yunjey deep_residual_network",
    "tiny_diffusion": "tanelp/tiny-diffusion",
    "dlrm": "facebookresearch/dlrm",
}
"""In the order of the tables."""
MORE_SCRIPTS = {
    "mnist_rnn": "pytorch/examples mnist_rnn",
    "mingpt_chargpt": "karpathy/minGPT chargpt",
    "nanogpt_wide": "karpathy/nanoGPT, 768 wide",
    "yunjey_logistic_regression": "yunjey logistic_regression",
    "yunjey_feedforward_neural_network": "yunjey feedforward_neural_network",
    "yunjey_convolutional_neural_network": "yunjey convolutional_neural_network",
    "yunjey_recurrent_neural_network": "yunjey recurrent_neural_network",
    "yunjey_bidirectional_recurrent_neural_network": "yunjey bidirectional_recurrent_neural_network",
    "yunjey_generative_adversarial_network": "yunjey generative_adversarial_network",
    "yunjey_variational_autoencoder": "yunjey variational_autoencoder",
    "classic_loop": "benchmarks/scripts/classic_loop.py",
    "digits_mlp": "examples/digits_mlp.py",
    "digits_cnn": "examples/digits_cnn.py",
}
"""Those that only `minute` shows, this project's own last."""
SHORT_LIST = ("word_language_model", "mnist", "makemore", "mingpt_adder")
LEVERS = {
    ("autocast", "bf16"): "bf16",
    ("optimizer", "fused"): "fused",
    ("memory kept by malloc", "retain"): "malloc retains memory",
    ("fp32 products", "medium"): "oneDNN matmul",
    ("torch.compile", "default"): "compile",
    ("threads", 1): "1 thread",
}
"""(lever, value) of the results -> the table's word, where it is not the lever's name."""
EXACTNESS = ("bit-identical", "rounding", "reduced")
CLAIMS = {"bit-identical": "bit-identical", "rounding": "rounding", "reduced": "reduced (16-bit)"}


def scripts(tunes: Document, plans: Document) -> str:
    """Tunes of ten minutes, and their plans beside those of an earlier version."""
    rows = []
    for name, title in SCRIPTS.items():
        tune, beside = tunes["scripts"][name]["long"], plans["scripts"][name]["comparison"]
        kept = ", ".join(LEVERS.get((lever, value), lever) for lever, value in tune["kept"])
        step, gain = format_seconds(tune["step_seconds"]), ratio(tune["speedup"])
        rows.append([title, step, gain, kept, _exactness(tune), ratio(beside) if beside else "the same"])
    header = ["script", "plain step", "gain", "kept", "numbers", "beside the earlier plan"]
    return table(header, rows, above(tunes))


def before_and_after(tunes: Document) -> str:
    """A few tunes of a minute, for the README. The step after is the plain one over the speed-up."""
    rows = []
    for name in SHORT_LIST:
        tune = tunes["scripts"][name]["short"]
        before, after = tune["step_seconds"], tune["step_seconds"] / tune["speedup"]["ratio"]
        numbers = CLAIMS[_exactness(tune)]
        rows.append([SCRIPTS[name], format_seconds(before), format_seconds(after), ratio(tune["speedup"]), numbers])
    return table(["unedited script", "step before", "after", "speed-up (95 % interval)", "numbers"], rows)


def minute(document: Document) -> str:
    """Tunes of a minute beside long ones, and what of these the short ones found."""
    rows = []
    titles = {**SCRIPTS, **MORE_SCRIPTS}
    for name in filter(document["scripts"].__contains__, titles):
        found = document["scripts"][name]
        short, long, compared = found["short"], found["long"], found["comparison"]
        gains = [_gain(short), _gain(long), f"{long['budget_seconds'] / 60:.0f} min"]
        share = "the same plan" if compared is None else f"{_thousandths(compared)[1:]}"
        after = short["most_of_the_gain_after_seconds"]
        seconds = f"{short['seconds']:.0f} s"
        step = format_seconds(short["step_seconds"] or long["step_seconds"])
        rows.append([titles[name], step, *gains, share, seconds, "" if after is None else f"{after:.0f} s"])
    header = ["script", "plain step", "a minute", "long tune", "its budget", "one over the other", "took", "most after"]
    return table(header, rows, above(document))


def exhaustive(document: Document) -> str:
    """What a search kept, beside the fastest of all combinations of its levers."""
    rows = []
    titles = {**SCRIPTS, **MORE_SCRIPTS, "mlp 512 128": "an MLP, 512 wide, batch 128"}
    for name, found in document["scripts"].items():
        share = "the same plan" if found["comparison"] is None else _thousandths(found["comparison"])[1:]
        kept = ", ".join(LEVERS.get((lever, value), lever) for lever, value in found["search_kept"])
        seconds = [f"{found[f'{which}_seconds']:.0f} s" for which in ("search", "exhaustive")]
        rows.append([titles[name], format_seconds(found["step_seconds"]), kept, share, *seconds])
        rows[-1].append(str(found["combinations"]))
    header = ["script", "plain step", "kept", "search over best", "search", "all combinations", "how many"]
    return table(header, rows, above(document))


def _gain(tune: Document) -> str:
    if tune["speedup"]:
        return ratio(tune["speedup"])
    return "refused: too short" if "refused" in tune else "nothing kept"


def _exactness(tune: Document) -> str:
    """The weakest claim of the levers that were kept."""
    return max((one["exactness"] for one in tune["trials"] if one["outcome"] == "kept"), key=EXACTNESS.index)


def gain(document: Document) -> str:
    """What tune stated, beside what was measured from outside."""
    rows = []
    for case in document["results"]:
        cells = [case["case"], format_seconds(case["plain_step_seconds"])]
        stated, seen = case["stated"], case["seen"]
        if stated is None:
            rows.append([*cells, "nothing kept", "", ""])
            continue
        half = (stated["high"] - stated["low"]) / 2 / stated["ratio"]
        inside = "yes" if stated["low"] <= seen["ratio"] <= stated["high"] else "no"
        rows.append([*cells, f"{_thousandths(stated)}, ±{100 * half:.1f} %", _thousandths(seen), inside])
    budgets = " or ".join(f"{one:.0f}" for one in sorted({case["budget_seconds"] for case in document["results"]}))
    caption = above(document, f", {budgets} s of tuning each")
    return table(["script", "step", "stated", "seen from outside", "inside"], rows, caption)


def _thousandths(found: Document) -> str:
    return f"x{found['ratio']:.3f} ({found['low']:.3f}–{found['high']:.3f})"


def watching(*results: Document) -> str:
    """What watching costs whole processes, a row for each machine."""
    loops = [result["loop"] for result in results[0]["results"]]
    rows = []
    for document in results:
        by_loop = {result["loop"]: result for result in document["results"]}
        rows.append([machine(document), *(_cost(by_loop[loop]) for loop in loops)])
    return table(["step: cost", *loops], rows, _notes(results))


def _cost(result: Document) -> str:
    found = result["comparison"]  # plain over watched
    cost, low, high = (100 * (1 / found[bound] - 1) for bound in ("ratio", "high", "low"))
    sign = "" if round(cost, 1) == 0 else "+" if cost > 0 else "−"
    bounds = f"{low:.1f}–{high:.1f}".replace("-", "−")
    return f"{format_seconds(median(result['plain']))}: {sign}{abs(cost):.1f} % ({bounds})"


def compiling(document: Document) -> str:
    """How long a first compilation takes, by torch alone and by the lever."""
    rows = []
    for name, found in document["models"].items():
        alone, lever, again = (found[way]["seconds"] for way in ("torch", "lever", "lever_again"))
        seconds = [f"{value:.1f} s" for value in (alone, lever, again, found["expected_seconds"])]
        rows.append([name, f"{found['operations']:,.0f}", seconds[0], seconds[1], f"{lever / alone:.2f}", *seconds[2:]])
    header = ["model", "operations in a step", "torch alone", "by the lever", "of torch's", "once more", "expected"]
    return table(header, rows, above(document))


def planted(*results: Document) -> str:
    """How often a lever of known worth was kept."""
    rows = []
    for document in sorted(results, key=machine):
        for one in document["results"]:
            lever = f"saves {one['gain']:.0%} of the work".replace("%", " %") if one["gain"] else "does nothing"
            beside = f", {one['beside']} busy processes beside it" if one["beside"] else ""
            kept = f"{one['kept']} of {one['comparisons']}"
            step = f"{format_seconds(one['step_seconds'])}{beside}"
            rows.append([machine(document), lever, step, kept, f"{one['median_pairs']:.0f}"])
    return table(["machine", "lever", "step", "kept", "pairs of windows (median)"], rows, _notes(results))


def null_tunes(*results: Document) -> str:
    """How often a whole tune of levers that do nothing ended with a plan."""
    rows = []
    for document in sorted(results, key=machine):
        tunes = document["tunes"]
        beside = f", {document['beside']} busy processes beside it" if document["beside"] else ""
        searched, ended = (f"{sum(one[kind] > 0 for one in tunes)}" for kind in ("kept_in_search", "kept"))
        budget = f"{document['budget_seconds']:.0f} s{beside}"
        rows.append([machine(document), budget, f"{len(tunes)}", searched, ended])
    return table(
        ["machine", "budget", "tunes", "kept something in the search", "ended with a plan"], rows, _notes(results)
    )


def proof(document: Document) -> str:
    """How many wrong levers the proof caught, and how many right ones it accepted."""
    rates = {name: found.rpartition(" ")[0] for name, found in document["rates"].items()}
    rows = [
        [
            f"{kind} scripts",
            rates[f"wrong, rounding, {kind}"],
            rates[f"wrong, reduced, {kind}"],
            rates[f"right, {kind}"],
        ]
        for kind in ("seeded", "unseeded")
    ]
    header = ["", "wrong, caught as 'within rounding'", "wrong, caught as 'reduced'", "right, accepted"]
    return table(header, rows, above(document))


# the library

TRAINING_WAYS = {
    "flatout": "flatout, same fp32 settings",
    "flatout, tuned": "flatout, tuned",
    "Accelerate": "Accelerate",
    "Fabric": "Fabric",
    "Lightning": "Lightning",
    "HF Trainer": "HF Trainer",
}
"""Without 'by hand, our batches', which is near 'flatout'."""


def training(document: Document) -> str:
    """A step of each way to train, against the loop by hand."""
    workloads = document["results"]
    by_hand = [format_seconds(one["rows"]["by hand"]["median_seconds"]) for one in workloads]
    rows = [["by hand", *by_hand]]
    for way, title in TRAINING_WAYS.items():
        rows.append([title, *(ratio(one["rows"][way]["against_by_hand"]) for one in workloads)])
    header = ["a step, against the loop by hand with a DataLoader", *(one["workload"] for one in workloads)]
    return table(header, rows, above(document))


FORECASTERS = {
    ("all", "flatout"): "`flatout.forecast`",
    ("held out", "flatout"): "on models set aside while its rules were made (see below)",
    ("all", "torch MemTracker"): "torch MemTracker",
    ("all", "DeepSpeed ZeRO-2"): "DeepSpeed's ZeRO-2 estimator",
    ("all", "accelerate"): "accelerate estimate-memory",
}


def forecast(document: Document) -> str:
    """Errors of the forecast of a step's peak on the CPU, beside those of others."""
    rows = []
    for (cases, forecaster), title in FORECASTERS.items():
        found = document["summary"][cases][forecaster]
        rows.append([title, f"{found['answered']} of {found['rows']}", *_errors(found)])
    header = ["forecast of a training step's peak", "cases answered", *ERRORS]
    return table(header, rows, above(document))


ERRORS = ("median error", "95th percentile", "more than 2 % too low")
CUDA_CASES = {
    "without cuDNN": "without cuDNN",
    "convolutions": "with convolutions, whose cuDNN workspaces are not known (up to 18 MiB)",
    "recurrent layers": "with recurrent layers, from a few small real steps",
}


def forecast_cuda(document: Document) -> str:
    """The same on a GPU: of what tensors hold, and of what is reserved."""
    rows = []
    for kind, title in CUDA_CASES.items():
        found = document["summary"][kind]
        both = zip(_errors(found["allocated"]), _errors(found["reserved"]), strict=True)
        cells = [rf"{allocated} \| {reserved}" for allocated, reserved in both]
        rows.append([f"{found['allocated']['rows']} cases {title}", *cells])
    return table(["", *ERRORS], rows, above(document))


def _errors(found: Document) -> list[str]:
    return [percent(found[name]) for name in ("median_error", "p95_error", "more_than_2_percent_below")]


GENERATORS = {
    "transformers fp32": "transformers fp32",
    "transformers bf16": "transformers bf16",
    "transformers bf16 compiled": "transformers bf16, static cache and compile",
    "flatout fp32": "flatout fp32",
    "flatout bf16": "flatout bf16",
    "flatout int8": "flatout int8",
    "flatout int4": "flatout int4",
}


def generation(document: Document) -> str:
    """Tokens per second, Flatout's bf16 beside transformers' bf16 and the others beside its fp32."""
    batches = [one for one in document["results"] if "batch" in one]
    single = next(one for one in batches if one["batch"] == 1)
    rows = []
    for name, title in GENERATORS.items():
        if name in single["rows"]:
            decoding = single["rows"][name].get("decoding")
            share = percent(decoding["median"]) if decoding else ""
            rows.append([title, *(_tokens(name, one["rows"][name]) for one in batches), share])
    read, new = single["prompt_tokens"], single["new_tokens"]
    batch_titles = [f"{one['batch']} prompt{'s' if one['batch'] > 1 else ''}, tokens/s" for one in batches]
    header = [
        f"GPT-2 124M, {read} tokens read, {new} generated",
        *batch_titles,
        "decoding 1 prompt, of what memory feeds",
    ]
    return table(header, rows, above(document, "; flatout bf16 against transformers bf16, the others against fp32"))


def _tokens(name: str, row: Document) -> str:
    speed = f"{row['tokens_per_second']:,.0f}"
    if not name.startswith("flatout"):
        return speed
    peer = "transformers bf16" if name == "flatout bf16" else "transformers fp32"
    return f"{speed}, {ratio(row[f'against {peer}'])}"


ENCODERS = {
    "transformers fp32, padded to 128": ("transformers fp32, padded to 128", "fp32"),
    "transformers bf16, longest in batch": ("transformers bf16, longest in batch", "bf16"),
    "transformers bf16, sorted": ("transformers bf16, sorted", "bf16"),
    "flatout bf16, transformers' model": ("flatout bf16", "bf16"),
    "flatout int8, transformers' model": ("flatout int8", "int8"),
}
"""Name in the results -> its title, and the product whose share it is."""


def encode(document: Document) -> str:
    """Sentences per second of an encoder."""
    rows = []
    for name, (title, dtype) in ENCODERS.items():
        found = document["results"][name]
        gained = "" if name == document["baseline"] else ratio(found["against_baseline"])
        share = f"{percent(found['share_of_product'])} of {dtype}"
        rows.append([title, f"{found['items_per_second']:.3g}", gained, share])
    lengths = document["lengths"]
    title = f"BERT-Large shape, {len(lengths)} ragged sentences (mean {sum(lengths) / len(lengths):.0f} tokens)"
    header = [title, "sentences/s", "", "of the measured product, real tokens only"]
    return table(header, rows, above(document))


GPU_WAYS = {
    "TrainStep, no plan": "TrainStep, no plan",
    "TrainStep, bf16 + fused": "TrainStep, bf16, fused optimizer (ResNet: channels_last)",
    "TrainStep, bf16 + fused + compile": "TrainStep, the same and torch.compile",
    "by hand, bf16 + fused + compile": "by hand, the same choices",
}
GPU_WORKLOADS = ("ResNet-50, batch 64, 224 x 224", "GPT-2 124M, batch 8 of 1024 tokens")
"""Without the MLP, which the page discusses in a sentence."""


def gpu_training(document: Document) -> str:
    """A training step on a GPU, against the plain loop, and its peak memory."""
    by_name = {one["workload"]: one["rows"] for one in document["results"]}
    workloads = [by_name[name] for name in GPU_WORKLOADS]
    plain = [(format_seconds(one["by hand, fp32"]["median_seconds"]), one["by hand, fp32"]) for one in workloads]
    rows = [["plain loop, TF32 products", *(f"{step}, {_peak(row)}" for step, row in plain)]]
    for way, title in GPU_WAYS.items():
        cells = [f"{ratio(one[way]['against_plain'])}, {_peak(one[way])}" for one in workloads]
        rows.append([title, *cells])
    return table(["a training step, batches on the GPU", *GPU_WORKLOADS], rows, above(document))


def _peak(row: Document) -> str:
    return format_bytes(row["peak_bytes"])


# flatout bench


def bench(*results: Document) -> str:
    """Workloads of several files of one machine."""
    parsed = [(BenchResult.from_json(_payload(one)), one) for one in results]
    rows = []
    for found, _ in parsed:
        for work in found.workloads:
            plain = work.plain()
            for row in work.rows:
                against, share = work.against_plain(row), found.share_of_ceiling(work, row)
                rows.append(
                    (
                        f"{work.title}, {work.size}" if row is plain else "",
                        row.name,
                        f"{work.items_per_second(row):,.1f} {work.unit}/s",
                        "" if against is None else ratio(vars(against)),
                        "" if share is None else percent(share),
                        row.how.replace("kernels for matrix units", "bf16 kernels"),  # the earlier name
                    )
                )
            if (best := work.against_peer()) is not None:
                ours, peer = work.ours(), work.peer()
                assert ours is not None
                assert peer is not None
                rows.append(("", f"*{ours.name} against {peer.name}*", "", f"**{ratio(vars(best))}**", "", ""))
    header = ("workload", "", "", "against plain torch", "ceiling", "how")
    return table(header, rows, above(parsed[0][1]))


CLASSES = {"matmul": "products", "normalisation": "norms", "softmax": "softmax and loss", "copy": "copies and casts"}
"""Of operators, in words."""


def account(document: Document) -> str:
    rows = []
    for name, found in document["results"].items():
        shares: dict[str, float] = {}
        for row in found["rows"]:
            shares[row["class"]] = shares.get(row["class"], 0.0) + row["share"]
        told = sorted(shares.items(), key=lambda item: -item[1])
        words = ", ".join(f"{CLASSES.get(kind, kind)} {percent(share)}" for kind, share in told if share >= 0.01)
        rows.append((name, format_seconds(found["step_seconds"]), percent(sum(shares.values())), words))
    return table(("step", "takes", "accounted for", "of it"), rows)


def claims(document: Document) -> str:
    found = ClaimsResult.from_json(_payload(document))
    rows = []
    for claim in found.claims:
        cases = [f"{case.condition} {measured_text(claim, case)}" for case in claim.cases]
        rows.append((claim.says, claim.verdict, "; ".join(cases) or claim.reason))
    return table(("what guides say", "here", "measured"), rows, above(document))


# many ranks

REFUSED = {
    "batch norm": "refused: batch norm",
    "no rule": "no rule",
    "and there are 4 ranks": "too few blocks",
    "ranks share it": "heads do not divide",
    "no repeated blocks": "no blocks",
    "do not form a chain": "no chain",
}
"""A word of the reason -> what stands for it."""


def ranks_matrix(document: Document) -> str:
    """By model and strategy: the larger difference of losses and weights, as a multiple of one rounding's."""
    cells = {(one["model"], one["strategy"], one["ranks"]): one for one in document["cells"]}
    models, strategies = (list(dict.fromkeys(one[key] for one in document["cells"])) for key in ("model", "strategy"))
    rows = []
    for model in models:
        every = [[cells.get((model, name, count)) for count in (2, 4)] for name in strategies]
        of_model = [[one for one in pair if one is not None] for pair in every]  # two ranks do not share in two ways
        rows.append([model, *(", ".join(dict.fromkeys(map(_matrix_cell, pair))) for pair in of_model)])
    more = f", {document['steps']} steps, {_ranks(document['cells'])}"
    return table(["model", *strategies], rows, above(document, more))


def _ranks(rows: Iterable[Document]) -> str:
    """'2 and 4 ranks'."""
    return " and ".join(f"{count}" for count in sorted({one["ranks"] for one in rows})) + " ranks"


def _matrix_cell(cell: Document) -> str:
    if "refused" in cell:
        return next((short for word, short in REFUSED.items() if word in cell["refused"]), "refused")
    return f"{max(cell['of_noise']):.2g}" if cell["alike"] and cell["same_samples"] else "DIFFERENT"


def ranks_overhead(document: Document) -> str:
    """Two ranks, beside the same loop by hand."""
    rows = [
        [one["one"], one["other"], ratio(one["comparison"]).removeprefix("x"), percent(one["weak_scaling"][one["one"]])]
        for one in document["rows"]
    ]
    header = ["", "beside", "speed of the one over that of the other", "of one rank's speed, per rank"]
    return table(header, rows, above(document, f", {document['ranks']} ranks with a thread each"))


def ranks_memory(document: Document) -> str:
    """By strategy: errors of the forecast, and how much more was held in some steps."""
    rows = []
    for name in dict.fromkeys(one["strategy"] for one in document["rows"]):
        found = [one for one in document["rows"] if one["strategy"] == name]
        errors = [100 * abs(one["error"]) for one in found]
        late = max(one["most_bytes"] / one["measured_bytes"] for one in found) - 1
        rows.append([name, f"{len(found)}", f"{median(errors):.2f} %", f"{max(errors):.2f} %", percent(late)])
    header = ["", "models and ranks", "median error", "largest", "more than that held in some step, at most"]
    return table(header, rows, above(document, f", {_ranks(document['rows'])}"))


FAULTS = {
    "kill": "SIGKILL to a rank",
    "kill all": "SIGKILL to every rank at once",
    "hang": "SIGSTOP to a rank, for good",
    "slow": "SIGSTOP to a rank for a second",
    "term": "SIGTERM to a rank",
    "disk full": "no room for checkpoints",
    "network": "a host with one of the ranks cut off for 1 to 40 s",
}


def faults(document: Document) -> str:
    """Of each kind: how many there were, and how many left what was promised."""
    rows = []
    for kind, title in FAULTS.items():
        found = [one for one in document["faults"].values() if one["kind"] == kind]
        kept = sum(one["as_promised"] and one["same_weights"] for one in found)
        restarted = sum(one["restarts"] > 0 for one in found)
        left = sum(one["processes_left"] for one in found)
        rows.append([title, f"{len(found)}", f"{kept}", f"{restarted}", f"{left}"])
    header = ["fault", "done", "as promised, same weights", "started again", "processes left"]
    return table(header, rows, above(document))


HOSTS = {
    "plain": "nothing happens",
    "cut for 3 s": "a host is cut off for 3 s",
    "cut for 30 s": "for 30 s",
    "back later": "until the others go on",
    "cut for good": "for good, with --min-nnodes 2",
    "killed": "its launcher and rank are killed",
    "host 0 cut": "the host that leads is cut off",
    "slow link": "a link has 20 Mbit/s",
}


def hosts(document: Document) -> str:
    """Three hosts on one machine."""
    rows = []
    for kind, title in HOSTS.items():
        one = document["cases"][kind]
        if "bit_identical" in one:
            weights = "bit-identical" if one["bit_identical"] else "DIFFERENT"
        elif "difference" in one:
            rounding = one["difference_of_one_rounding"]
            weights = f"{one['difference']:.0e}; one rounding error changes them by {rounding:.0e}"
        else:
            weights = f"all hosts ended in {format_seconds(one['seconds_until_all_ended'])}, and said why"
        rows.append([title, f"{one['restarts']}", weights, "yes" if one["as_promised"] else "NO"])
    return table(["", "restarts", "weights", "as promised"], rows, above(document))


def planning(document: Document) -> str:
    """Planned beside published: tokens each second and memory of a GPU."""
    rows = []
    for one in document["published"]:
        tokens, memory = one["published"]["tokens_per_second"], one["published"]["memory_gib"]
        published = f"{tokens:,.0f} tokens/s" + ("" if memory is None else f", {memory:.0f} GiB")
        planned, error = one["reason"].partition(":")[0] if "reason" in one else "", "not predicted"
        if "planned" in one:
            found, wrong = one["planned"], one["errors"]
            planned = f"{found['tokens_per_second']:,.0f} tokens/s, {found['memory_gib']:.0f} GiB"
            error = f"{wrong['tokens_per_second']:+.1%}" if one["label"] == "test" else "fitted to it"
            error += "" if wrong["memory"] is None else f", {wrong['memory']:+.0%} memory"
            error = error.replace("%", " %").replace("-", "\u2212")
        rows.append([f"{one['model']}, {one['how']}", published, planned, error])
    return table(["run, a GPU of it", "published", "planned", "error"], rows)


def _payload(document: Document) -> Document:
    return {name: value for name, value in document.items() if name not in ("flatout", "note")}


TABLES: dict[str, Callable[..., str]] = {
    "bench": bench,
    "account": account,
    "claims": claims,
    "scripts": scripts,
    "before_and_after": before_and_after,
    "minute": minute,
    "exhaustive": exhaustive,
    "gain": gain,
    "watching": watching,
    "compiling": compiling,
    "planted": planted,
    "null_tunes": null_tunes,
    "proof": proof,
    "training": training,
    "forecast": forecast,
    "forecast_cuda": forecast_cuda,
    "generation": generation,
    "encode": encode,
    "gpu_training": gpu_training,
    "ranks_matrix": ranks_matrix,
    "ranks_memory": ranks_memory,
    "ranks_overhead": ranks_overhead,
    "faults": faults,
    "hosts": hosts,
    "planning": planning,
}
