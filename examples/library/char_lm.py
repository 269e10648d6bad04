"""Train a character model on Python's own source text with the library and let it write; started again it goes on.

python examples/library/char_lm.py --steps 600 --folder runs/char_lm
flatout launch --nproc-per-node 2 examples/library/char_lm.py --steps 600 --folder runs/char_lm --parallel ddp
"""

import argparse
import math
import pathlib
import sysconfig

import torch
from torch import nn

import flatout
from flatout.models import GPT2, GPT2Config


def read_source_text(characters: int) -> str:
    """The beginning of the standard library's modules, one after the other, as plain ASCII."""
    pieces, length = [], 0
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        pieces.append(path.read_text(encoding="utf-8", errors="ignore").encode("ascii", "ignore").decode())
        length += len(pieces[-1])
        if length >= characters:
            break
    return "".join(pieces)[:characters]


class Characters:
    """One token a character of the alphabet."""

    def __init__(self, alphabet: list[str]) -> None:
        self.alphabet = alphabet

    def encode(self, text: str) -> list[int]:
        return [self.alphabet.index(character) for character in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.alphabet[token] for token in tokens)


def unigram_entropy(tokens: torch.Tensor) -> float:
    """Nats a character, for who knows the frequencies and nothing else."""
    share = torch.bincount(tokens).double() / len(tokens)
    return float(-(share * share.clamp_min(1e-300).log()).sum())


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """`batch` [batch, block + 1]: each character is predicted from those before it."""
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def write(model: nn.Module, alphabet: list[str], characters: int) -> None:
    """Let the model go on from "def "."""
    writer = flatout.TokenGenerator(model, flatout.Plan(precision="bf16"), tokenizer=Characters(alphabet))
    written = writer.generate("def ", max_new_tokens=characters, temperature=0.7, top_k=20, seed=1)
    print("def " + written.texts[0])
    print(written.summary())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--folder", default="runs/char_lm")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--characters", type=int, default=1_000_000)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", choices=("ddp", "zero1", "fsdp"), help="how several ranks share the training")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    here = flatout.ranks()  # started by plain python: rank 0 of 1
    device = here.device
    text = read_source_text(arguments.characters)
    alphabet = sorted(set(text))
    numbers = {character: i for i, character in enumerate(alphabet)}
    tokens = torch.tensor([numbers[character] for character in text])
    split = int(0.95 * len(tokens))
    # Windows that overlap by half: a view, so the text lies in memory once.
    windows = tokens[:split].unfold(0, arguments.block + 1, arguments.block // 2)
    held_out = tokens[split:].unfold(0, arguments.block + 1, arguments.block)

    config = GPT2Config(
        vocab_size=len(alphabet),
        max_tokens=arguments.block,
        width=arguments.width,
        layers=arguments.layers,
        heads=max(1, arguments.width // 32),
    )
    model = GPT2(config).to(device)
    plan = flatout.Plan(precision=arguments.precision, optimizer="fused", parallel=arguments.parallel)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    warmup = max(1, min(100, arguments.steps // 10))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, i / arguments.steps)))),
    )
    step = flatout.TrainStep(model, optimizer, loss_fn, plan, clip_norm=1.0, scheduler=scheduler)
    train = flatout.batches(windows, 16, plan, seed=arguments.seed, device=device)
    test = flatout.batches(held_out, 32, plan, shuffle=False, device=device)
    result = flatout.fit(
        step,
        train,
        steps=arguments.steps,
        evaluation=lambda: flatout.evaluate(step, test),
        checkpoints=flatout.Checkpoints(arguments.folder, asynchronous=True),
        save_every_steps=100,
    )
    if not here.first:
        return
    resumed = f" after step {result.resumed_at_step}" if result.resumed_at_step is not None else ""
    print(f"{result.steps} steps{resumed}")
    if result.evaluations:
        entropy = unigram_entropy(tokens[split:])
        print(
            f"held-out loss {result.evaluations[-1]['loss']:.3f} nats a character; of frequencies alone {entropy:.3f}"
        )
    if arguments.parallel != "fsdp":  # the first rank alone has a part of the model only
        write(model, alphabet, arguments.block - 10)


if __name__ == "__main__":
    main()
