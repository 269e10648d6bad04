# subject: starved-loader
# also: disk-time, slow-transform, per-sample-fetch
# thread: own
# steps: 160
# gain: yes
# device: cpu
# what: Records are streamed from shards on a slow store, and the training loop waits for each of them.

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    """Sensor windows in shards of an object store; each request takes a while."""

    def __init__(self, shards: int, per_shard: int) -> None:
        self.shards, self.per_shard = shards, per_shard

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for shard in range(first, self.shards, step):
            generator = torch.Generator().manual_seed(shard)
            windows = torch.randn(self.per_shard, 256, generator=generator)
            labels = (windows[:, ::2].sum(1) > 0).long()
            for start in range(0, self.per_shard, 32):
                time.sleep(0.012)
                for i in range(start, start + 32):
                    yield windows[i], labels[i]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(Shards(8, 512), batch_size=128, num_workers=args.workers, persistent_workers=True)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for epoch in range(args.epochs):
        seen, right = 0, 0
        for x, y in loader:
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen, right = seen + len(y), right + (out.argmax(1) == y).sum().item()
        print(f"epoch {epoch + 1}: accuracy {right / seen:.3f}")


if __name__ == "__main__":
    main()
