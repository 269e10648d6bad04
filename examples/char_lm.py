"""Train a small character-level GPT on the source text of Python's own standard library.

python char_lm.py --steps 500
"""

import argparse
import math
import pathlib
import sysconfig
import time

import torch
import torch.nn.functional as F
from torch import nn


def read_source_text(characters: int) -> str:
    """The beginning of the standard library's modules, one after the other, as plain ASCII."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    pieces, length = [], 0
    for path in sorted(library.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore").encode("ascii", "ignore").decode()
        pieces.append(text)
        length += len(text)
        if length >= characters:
            break
    return "".join(pieces)[:characters]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.project(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    def __init__(self, vocabulary: int, block_size: int, width: int, layers: int, heads: int, dropout: float):
        super().__init__()
        self.block_size = block_size
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self.init_weights)

    def init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    @torch.no_grad()
    def generate(self, idx, length):
        for _ in range(length):
            logits, _ = self(idx[:, -self.block_size :])
            next_token = torch.multinomial(F.softmax(logits[:, -1], dim=-1), num_samples=1)
            idx = torch.cat((idx, next_token), dim=1)
        return idx


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Character-level GPT on Python source text")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--eval-interval", type=int, default=200)
    parser.add_argument("--eval-batches", type=int, default=20)
    parser.add_argument("--log-interval", type=int, default=20)
    parser.add_argument("--characters", type=int, default=2_000_000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--sample", type=int, default=200, help="characters to generate at the end")
    parser.add_argument("--seed", type=int, default=1337)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    text = read_source_text(args.characters)
    alphabet = sorted(set(text))
    index_of = {character: i for i, character in enumerate(alphabet)}
    data = torch.tensor([index_of[character] for character in text])
    split = int(0.9 * len(data))
    splits = {"train": data[:split], "val": data[split:]}
    print(f"{len(data):,} characters, {len(alphabet)} different ones, on {device}")

    def get_batch(name):
        source = splits[name]
        starts = torch.randint(len(source) - args.block_size, (args.batch_size,))
        x = torch.stack([source[i : i + args.block_size] for i in starts])
        y = torch.stack([source[i + 1 : i + 1 + args.block_size] for i in starts])
        return x.to(device), y.to(device)

    model = CharGPT(len(alphabet), args.block_size, args.width, args.layers, args.heads, args.dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, betas=(0.9, 0.99))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        losses = torch.zeros(args.eval_batches)
        for k in range(args.eval_batches):
            _, loss = model(*get_batch("val"))
            losses[k] = loss.item()
        model.train()
        return losses.mean().item()

    warmup = min(100, args.steps // 10 + 1)
    start = time.time()
    for step in range(1, args.steps + 1):
        progress = step / args.steps
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(step / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

        x, y = get_batch("train")
        _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()

        if step % args.log_interval == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}")
        if step % args.eval_interval == 0 or step == args.steps:
            validation_loss = estimate_loss()
            seconds = time.time() - start
            print(f"step {step:5d}  validation loss {validation_loss:.4f}  {seconds:.1f} s")

    model.eval()
    prompt = torch.tensor([[index_of["\n"]]], device=device)
    print("".join(alphabet[i] for i in model.generate(prompt, args.sample)[0].tolist()))


if __name__ == "__main__":
    main()
