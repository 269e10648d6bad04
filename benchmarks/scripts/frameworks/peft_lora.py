"""PEFT: LoRA on a small GPT-2, in a loop of one's own."""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
tokens = torch.randint(0, 100, (128, 16))
model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2))
model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True))
model.print_trainable_parameters()
optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=1e-2)
for epoch in range(3):
    for batch in DataLoader(tokens, batch_size=8, shuffle=True):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(epoch, loss.item().hex())
torch.save({name: one.detach() for name, one in model.named_parameters() if one.requires_grad}, "lora.pt")
