# tricky: Train and evaluation mode in turn, each with its own forward passes.
# steps: 384
# device: cpu

import torch
from torch import nn

torch.manual_seed(107)
x = torch.randn(2560, 64)
y = (x @ torch.randn(64, 5)).argmax(1)
model = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)


@torch.inference_mode()
def evaluate() -> tuple[float, float]:
    model.eval()
    logits = model(x[2048:])
    loss = nn.functional.cross_entropy(logits, y[2048:]).item()
    model.train()
    return loss, (logits.argmax(1) == y[2048:]).float().mean().item()


for epoch in range(12):
    for chosen in torch.randperm(2048).split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step()
    held_out, accuracy = evaluate()
    scheduler.step(held_out)
    print(f"epoch {epoch}: held-out loss {held_out:.4f}, accuracy {accuracy:.1%}")
