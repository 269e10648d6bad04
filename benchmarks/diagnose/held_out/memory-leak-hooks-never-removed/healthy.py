# subject: memory-leak
# also: graph-kept-by-logging
# thread: https://github.com/NeuroBench/neurobench/issues/184
# steps: 240
# gain: no
# device: cpu
# what: A measurement of sparsity registers hooks every 40 steps and stores what they see; none of it is ever removed.

import torch
from sklearn.datasets import load_digits
from torch import nn


class ActivationStore:
    """Outputs of the ReLU layers."""

    def __init__(self, model):
        self.model = model
        self.outputs = []
        self.handles = []

    def attach(self):
        for layer in self.model:
            if isinstance(layer, nn.ReLU):
                self.handles.append(layer.register_forward_hook(self._keep))

    def _keep(self, layer, inputs, output):
        self.outputs.append(output.detach().clone())

    def sparsity(self):
        return sum((one == 0).float().mean().item() for one in self.outputs[-2:]) / 2

    def detach(self):
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.outputs.clear()


torch.manual_seed(14)
pixels, labels = load_digits(return_X_y=True)
pixels, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
store = ActivationStore(model)
for step in range(240):
    rows = torch.randint(0, len(labels), (128,))
    if step % 40 == 0:
        store.attach()
    loss = nn.functional.cross_entropy(model(pixels[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 1:
        print(f"step {step + 1}: loss {loss.item():.4f}, sparsity {store.sparsity():.3f}")
        store.detach()
