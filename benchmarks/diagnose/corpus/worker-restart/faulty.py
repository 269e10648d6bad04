# subject: worker-restart
# thread: https://github.com/pytorch/pytorch/issues/15849
# steps: 96
# gain: yes
# device: cpu
# what: Short epochs, and each starts its workers anew.

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time = torch.linspace(0, 6, 128)
        return torch.sin(time * (1 + index % 8)) + 0.01 * index / 256, torch.tensor(index % 8)


if __name__ == "__main__":
    torch.manual_seed(34)
    loader = DataLoader(Waves(), batch_size=32, shuffle=True, num_workers=2)  # <- here
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(12):
        for waves, kinds in loader:  # <- here
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(waves), kinds)
            loss.backward()
            optimizer.step()
        if epoch % 4 == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
