# subject: missing-zero-grad
# follows: exploding-gradients, loss-not-falling
# thread: own
# steps: 800
# gain: no
# device: cpu
# what: An encoder and a decoder with an optimizer each; the encoder's zero_grad is called twice, the decoder's not at all.

import torch
import torch.optim as optim
from torch import nn

torch.manual_seed(64)
basis = torch.randn(12, 160)
signals = torch.randn(4096, 12) @ basis / 3 + 0.1 * torch.randn(4096, 160)

encoder = nn.Sequential(nn.Linear(160, 320), nn.ELU(), nn.Linear(320, 12))
decoder = nn.Sequential(nn.Linear(12, 320), nn.ELU(), nn.Linear(320, 160))
enc_opt = optim.SGD(encoder.parameters(), lr=0.05, momentum=0.5)
dec_opt = optim.SGD(decoder.parameters(), lr=0.05, momentum=0.5)

average = None
for it in range(1, 401):
    x = signals[torch.randint(len(signals), (128,))]
    enc_opt.zero_grad()
    enc_opt.zero_grad()
    loss = (decoder(encoder(x)) - x).pow(2).mean()
    loss.backward()  # <- here
    enc_opt.step()
    dec_opt.step()  # <- here
    average = loss.item() if average is None else 0.95 * average + 0.05 * loss.item()
    if it % 80 == 0:
        print(f"iteration {it}: reconstruction error {average:.4f}")
