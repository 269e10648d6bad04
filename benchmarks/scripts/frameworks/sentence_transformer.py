"""Sentence Transformers: an encoder with pooling, trained on pairs by the library's trainer."""

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

torch.manual_seed(0)
texts = [" ".join(str(number * 7919 % 97) for number in range(first, first + 12)) for first in range(97)]
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=special, show_progress=False))
names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **names).save_pretrained("bert")
size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BertModel(BertConfig(vocab_size=tokenizer.get_vocab_size(), **size)).save_pretrained("bert")
model = SentenceTransformer(modules=[Transformer("bert", max_seq_length=32), Pooling(32)], device="cpu")
arguments = SentenceTransformerTrainingArguments(
    output_dir="out", per_device_train_batch_size=8, num_train_epochs=2, logging_steps=5, report_to="none",
    save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0,
)  # fmt: skip
pairs = Dataset.from_dict({"anchor": texts[:-1], "positive": texts[1:]})
loss = losses.MultipleNegativesRankingLoss(model)
trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss)
trainer.train()
for entry in trainer.state.log_history:
    print({name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name})
torch.save(model.state_dict(), "model.pt")
