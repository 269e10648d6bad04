# subject: huge-softmax
# thread: https://github.com/facebookresearch/pytext/pull/609
# steps: 60
# gain: yes
# device: cpu
# what: A softmax over 40,000 words takes nearly the whole step of a small language model.

import torch
from torch import nn

torch.manual_seed(51)
VOCABULARY = 40000
frequencies = 1.0 / torch.arange(1, VOCABULARY + 1)
text = torch.multinomial(frequencies, 20000, replacement=True)
embedding = nn.EmbeddingBag(VOCABULARY, 64)
output = nn.AdaptiveLogSoftmaxWithLoss(64, VOCABULARY, cutoffs=[1000, 8000])
optimizer = torch.optim.SGD([*embedding.parameters(), *output.parameters()], lr=4.0)
for step in range(60):
    starts = torch.randint(0, 19990, (128,))
    windows = text[starts.unsqueeze(1) + torch.arange(9)]
    context = embedding(windows[:, :8])
    optimizer.zero_grad()
    loss = output(context, windows[:, 8]).loss
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
