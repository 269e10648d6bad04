# subject: pageable-copies
# thread: https://github.com/boreshkinai/delta-interpolator/pull/3
# steps: 100
# gain: yes
# device: cuda
# what: Batches of 38 MB go to the GPU from pageable memory.

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    torch.manual_seed(200)
    images = torch.randn(3200, 3, 224, 224)
    labels = (images[:, 0].mean((1, 2)) > 0).long()
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True, num_workers=4)  # <- here
    model = nn.Sequential(nn.Conv2d(3, 64, 7, stride=2), nn.ReLU(), nn.Conv2d(64, 256, 3), nn.ReLU())
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 2)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for x, y in loader:
            x, y = x.cuda(), y.cuda()  # <- here
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
