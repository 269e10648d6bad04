# subject: costly-checkpointing
# thread: https://github.com/Nerogar/OneTrainer/issues/40
# steps: 120
# gain: yes
# device: cpu
# what: Activations of a model that fits many times over are recomputed, because an option is on by default.

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Mixer(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.across = nn.Sequential(
            nn.LayerNorm(tokens), nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens)
        )
        self.within = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.across(x.transpose(1, 2)).transpose(1, 2)
        return x + self.within(x)


class Net(nn.Module):
    def __init__(self, checkpointing: bool, width: int = 128) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.patches = nn.Linear(12, width)
        self.blocks = nn.ModuleList(Mixer(16, width) for _ in range(6))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x)
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=False)  # <- here
            else:
                x = block(x)
        return self.head(x.mean(1))


parser = argparse.ArgumentParser()
parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--steps", type=int, default=120)
args = parser.parse_args()
torch.manual_seed(36)
patches = torch.randn(1500, 16, 12)
labels = patches.mean(2).argmax(1) % 3
net = Net(args.gradient_checkpointing)
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4)
for step in range(args.steps):
    rows = torch.randint(0, 1500, (64,))
    loss = nn.functional.cross_entropy(net(patches[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1}: {loss.item():.4f}")
