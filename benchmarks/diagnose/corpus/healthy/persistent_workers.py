# tricky: A loader with workers over several epochs, which keeps them and is not waited for.
# steps: 60
# device: cpu

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sines(Dataset):
    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        grid = torch.linspace(0, 1, 256)
        return torch.sin(grid * (5 + index % 6 * 4)), torch.tensor(index % 6)


def main() -> None:
    torch.manual_seed(117)
    torch.set_num_threads(1)
    loader = DataLoader(Sines(), batch_size=24, shuffle=True, num_workers=1, persistent_workers=True)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), *hidden, nn.Linear(1024, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        for waves, kinds in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(waves), kinds)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
