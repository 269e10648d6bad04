"""`python -m benchmarks.infer.encode`: BERT-Large over ragged sentences, Flatout beside transformers.

256 sentences of random tokens, log-normal in length (mean about 27); random weights. In turns, per sentence:

    transformers fp32, padded to 128      as the guides do it; 8 sentences a round (each costs the same)
    transformers bf16, longest in batch   32 a batch in the order given; 64 sentences a round, all within 4 rounds
    transformers bf16, sorted             the same after sorting by length, which few do; 64 a round
    flatout ...                           all 256 a round, with the same transformers model or flatout's own Bert

Shares are of a 2,048-square product of torch, in turns in the same run, counting operations on real tokens only.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.infer.turns import Turn, product_flops_per_second, rows, take_turns, versions, write
from flatout import Plan
from flatout.infer.prediction.predict import Predictor
from flatout.models import Bert, BertConfig
from flatout.statistics import median

SENTENCES, LONGEST, BATCH, VOCABULARY = 256, 128, 32, 30522
PLANS = {
    "bf16": Plan(precision="bf16"),
    "int8": Plan(precision="bf16", weights="int8", activations="int8"),
    "fp32": Plan(),
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.infer.encode", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=24, help="fewer than BERT-Large's 24, to try the benchmark")
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    sentences = _sentences()
    lengths = [len(one) for one in sentences]
    print(f"{SENTENCES} sentences, mean {sum(lengths) / SENTENCES:.1f}, longest {max(lengths)} tokens")
    predictors, contenders, errors = _contenders(sentences, arguments.layers)
    for dtype in ("fp32", "bf16", "int8"):
        contenders[f"product {dtype}"] = product_flops_per_second(dtype)
    samples = take_turns(contenders, arguments.rounds)
    products = {dtype: 1 / median(samples.pop(f"product {dtype}")) for dtype in ("fp32", "bf16", "int8")}
    baseline = next(iter(samples))
    found = rows(samples, baseline)
    flops = _flops_per_sentence(predictors, sentences)
    for name, row in found.items():
        dtype = next((kind for kind in products if kind in name), "bf16")
        row["share_of_product"] = flops * row["items_per_second"] / products[dtype]
        row["difference_from_fp32"] = errors.get(name)
        ratio = row["against_baseline"]
        print(
            f"{name:38} {row['items_per_second']:7.2f}/s  x{ratio['ratio']:.2f} ({ratio['low']:.2f} to "
            f"{ratio['high']:.2f})  {row['share_of_product']:.1%} of the {dtype} product"
        )
    document: dict[str, Any] = {"benchmark": "infer_encode", "versions": versions("transformers", "flatout")}
    document |= {"lengths": lengths, "layers": arguments.layers, "rounds": arguments.rounds}
    document |= {"flops_per_sentence": flops, "product_flops_per_second": products, "baseline": baseline}
    write(arguments.out, {**document, "results": found})
    return 0


def _sentences() -> list[torch.Tensor]:
    draw = random.Random(0)
    lengths = [min(LONGEST, max(4, round(draw.lognormvariate(math.log(27) - 0.18, 0.6)))) for _ in range(SENTENCES)]
    return [torch.randint(999, VOCABULARY, (length,)) for length in lengths]


def _contenders(
    sentences: list[torch.Tensor], layers: int
) -> tuple[dict[str, Predictor], dict[str, Turn], dict[str, float]]:
    contenders: dict[str, Turn] = {}
    models: dict[str, torch.nn.Module] = {}
    try:
        import transformers

        logging.getLogger("transformers").setLevel(logging.ERROR)
        config = transformers.BertConfig(
            hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096
        )
        theirs = transformers.BertModel(config).eval()
        models["transformers' model"] = theirs
        reduced = transformers.BertModel(config).eval()
        reduced.load_state_dict(theirs.state_dict())
        reduced.bfloat16()
        contenders["transformers fp32, padded to 128"] = _padded_to_128(theirs, sentences)
        contenders["transformers bf16, longest in batch"] = _longest(reduced, sentences)
        contenders["transformers bf16, sorted"] = _longest(reduced, sorted(sentences, key=len))
    except ImportError as error:
        print(f"transformers is not installed ({error}): its rows are left out")
    if not models:
        models["own model"] = Bert(BertConfig.large(layers=layers)).eval()
    predictors = {
        f"flatout {kind}, {name}": Predictor(model, PLANS[kind]) for name, model in models.items() for kind in PLANS
    }
    errors = {}
    model = next(iter(models.values()))
    for name, predictor in predictors.items():
        contenders[name] = _flatout(predictor, sentences)
        errors[name] = _difference(model, predictor, sentences[:8])
        print(f"{name}: {'; '.join(predictor.run.notes)}; differs from fp32 by {errors[name]:.2%}")
    return predictors, contenders, errors


def _padded_to_128(model: Any, sentences: list[torch.Tensor]) -> Turn:
    def turn(number: int) -> int:
        start = number * 8 % SENTENCES
        _call(model, sentences[start : start + 8], LONGEST)
        return 8

    return turn


def _longest(model: Any, sentences: list[torch.Tensor]) -> Turn:
    """Two batches a round: the n-th from either end, so that four rounds are all sentences also when sorted."""
    batches = [sentences[start : start + BATCH] for start in range(0, SENTENCES, BATCH)]

    def turn(number: int) -> int:
        place = number % (len(batches) // 2)
        for batch in (batches[place], batches[-1 - place]):
            _call(model, batch, max(len(one) for one in batch))
        return 2 * BATCH

    return turn


def _call(model: Any, batch: list[torch.Tensor], tokens: int) -> None:
    ids, mask = torch.zeros(len(batch), tokens, dtype=torch.int64), torch.zeros(len(batch), tokens, dtype=torch.int64)
    for row, one in enumerate(batch):
        ids[row, : len(one)], mask[row, : len(one)] = one, 1
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=mask)


def _flatout(predictor: Predictor, sentences: list[torch.Tensor]) -> Turn:
    def turn(number: int) -> int:
        return sum(1 for _ in predictor(sentences))

    return turn


def _difference(model: Any, predictor: Predictor, sentences: list[torch.Tensor]) -> float:
    """Of the hidden states, relative, in the Euclidean norm, against the model itself in fp32, one by one."""
    with torch.inference_mode():
        right = torch.cat([model(one[None])[0][0] for one in sentences])
    found = torch.cat(
        [output[0] if isinstance(output, tuple) else output["last_hidden_state"] for output in predictor(sentences)]
    )
    return float((found - right).norm() / right.norm())


def _flops_per_sentence(predictors: dict[str, Predictor], sentences: list[torch.Tensor]) -> float:
    predictions = next(iter(predictors.values()))(sentences)
    predictions.collect()
    assert predictions.figures.flops is not None
    return predictions.figures.flops / len(sentences)


if __name__ == "__main__":
    sys.exit(main())
