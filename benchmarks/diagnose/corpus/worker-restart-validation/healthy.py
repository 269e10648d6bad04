# subject: worker-restart
# thread: https://github.com/open-mmlab/mmhuman3d/pull/233
# steps: 60
# gain: yes
# device: cpu
# what: The workers of the validation loader are started after every few training steps.

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(35)
    x = torch.randn(512, 96)
    y = (x @ torch.randn(96, 5)).argmax(1)
    train_x, train_y = x[:384], y[:384]
    held_out = TensorDataset(x[384:], y[384:])
    val_loader = DataLoader(held_out, batch_size=64, num_workers=2, persistent_workers=True)
    model = nn.Sequential(nn.Linear(96, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(60):
        chosen = torch.randint(0, 384, (64,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(train_x[chosen]), train_y[chosen])
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            with torch.no_grad():
                right = sum((model(a).argmax(1) == b).sum().item() for a, b in val_loader)
            print(f"step {step + 1}: loss {loss.item():.4f}, right {right} of 128")


if __name__ == "__main__":
    main()
