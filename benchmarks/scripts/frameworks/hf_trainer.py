"""The Trainer of transformers: a small GPT-2 on random tokens, with an evaluation and checkpoints."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
tokens = torch.randint(0, 100, (128, 16))
samples = [{"input_ids": row, "labels": row} for row in tokens]
model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2))
arguments = TrainingArguments(
    output_dir="out", num_train_epochs=3, per_device_train_batch_size=8, eval_strategy="epoch", save_strategy="epoch",
    logging_steps=10, report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=samples, eval_dataset=samples[:16])
trainer.train()
for entry in trainer.state.log_history:
    print({name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name})
