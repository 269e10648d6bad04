# subject: optimizer-made-in-each-step
# also: loss-not-falling
# thread: https://github.com/zju3dv/Vox-Fusion/issues/31
# steps: 300
# gain: no
# device: cpu
# what: Each update of the map makes its own Adam, whose averages begin at zero.

import torch
from torch import nn

torch.manual_seed(31)
points = torch.rand(4096, 3)
distances = (points - 0.5).norm(dim=1, keepdim=True) - 0.3
embeddings = nn.Embedding(512, 24)
decoder = nn.Sequential(nn.Linear(27, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 1))
cells = (points * 8).long().clamp(max=7)
voxel = cells[:, 0] * 64 + cells[:, 1] * 8 + cells[:, 2]


def refine(chosen: torch.Tensor) -> float:
    """One update of the map from the points of a frame."""
    optimizer = torch.optim.Adam([*embeddings.parameters(), *decoder.parameters()], lr=3e-3)  # <- here
    features = torch.cat((points[chosen], embeddings(voxel[chosen])), dim=1)
    loss = nn.functional.l1_loss(decoder(features), distances[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


for frame in range(300):
    loss = refine(torch.randint(0, len(points), (512,)))
    if frame % 100 == 99:
        print(f"frame {frame}: mean error {loss:.4f}")
