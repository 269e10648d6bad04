# subject: padding-waste
# thread: https://github.com/huggingface/transformers/issues/3634
# steps: 96
# gain: yes
# device: cpu
# what: Sentences of about 20 words are padded to 128.

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(39)
MAX_LENGTH, PAD = 128, 0
lengths = torch.randint(8, 33, (768,))
sentences = [torch.randint(1, 200, (int(length),)) for length in lengths]
moods = torch.tensor([int((sentence < 100).float().mean() > 0.5) for sentence in sentences])


def batch(chosen: list[int]) -> torch.Tensor:
    padded = pad_sequence([sentences[index] for index in chosen], batch_first=True, padding_value=PAD)
    return nn.functional.pad(padded, (0, MAX_LENGTH - padded.shape[1]), value=PAD)  # <- here


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 64, padding_idx=PAD)
        self.encoder = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        padding = tokens == PAD
        encoded = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        return self.head(encoded.masked_fill(padding.unsqueeze(-1), 0.0).sum(1) / (~padding).sum(1, keepdim=True))


model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(4):
    for chosen in torch.randperm(768).split(32):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch(chosen.tolist())), moods[chosen])  # <- here
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
