"""TRL: supervised fine-tuning of a small Llama with a tokenizer made here."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
texts = [" ".join(str(number * 7919 % 97) for number in range(first, first + 20)) for first in range(96)]
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=["<pad>", "<eos>"], show_progress=False))
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )
)  # fmt: skip
arguments = SFTConfig(
    output_dir="out", per_device_train_batch_size=8, num_train_epochs=2, logging_steps=5, max_length=48,
    report_to="none", save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, seed=0,
)  # fmt: skip
trainer = SFTTrainer(
    model=model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=fast
)
trainer.train()
for entry in trainer.state.log_history:
    print({name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name})
torch.save(model.state_dict(), "model.pt")
