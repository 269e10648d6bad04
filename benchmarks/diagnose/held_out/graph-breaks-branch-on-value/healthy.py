# subject: graph-breaks
# thread: own
# steps: 300
# gain: no
# device: cpu
# what: A compiled forward pass asks in Python whether a mean is large, which splits its graph.

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(4)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)


class Classifier(nn.Module):
    def __init__(self, hidden: int = 320) -> None:
        super().__init__()
        self.inputs = nn.Linear(64, hidden)
        self.hidden = nn.Linear(hidden, hidden)
        self.outputs = nn.Linear(hidden, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        pixels = torch.where(pixels.mean() > 1.0, pixels / 16, pixels)
        pixels = F.relu(self.inputs(pixels))
        return self.outputs(F.relu(self.hidden(pixels)))


def accuracy(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    model.train()
    return right


model = Classifier()
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for step in range(300):
    rows = torch.randint(0, 1500, (256,))
    loss = F.cross_entropy(compiled(x[rows]), y[rows])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss.item():.4f}, held out {accuracy(model):.3f}")
