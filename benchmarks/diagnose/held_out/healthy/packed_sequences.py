# tricky: Sequences of different lengths, sorted into batches and packed.
# steps: 160
# device: cpu

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

torch.manual_seed(213)
series = [torch.randn(int(n), 6).cumsum(0) / 5 for n in torch.randint(8, 24, (1600,))]
series.sort(key=len)
labels = torch.tensor([int(one[-1, 0] > one[0, 0]) for one in series])
starts = torch.arange(0, 1600, 80)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 128, batch_first=True)
        self.out = nn.Linear(128, 2)

    def forward(self, packed):
        _, (last, _) = self.rnn(packed)
        return self.out(last[-1])


batches = [(pack_sequence(series[s : s + 80], enforce_sorted=False), labels[s : s + 80]) for s in starts.tolist()]
model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(8):
    right = 0
    for number in torch.randperm(len(batches)).tolist():
        packed, wanted = batches[number]
        out = model(packed)
        loss = nn.functional.cross_entropy(out, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += (out.argmax(1) == wanted).sum().item()
    print(f"epoch {epoch}: {right / 1600:.3f}")
