"""The guides' models, small and fast: one file per family, with a config and its modules.

Repeated blocks are in an `nn.ModuleList` named `blocks` (an encoder-decoder has two), so that they can be
compiled, checkpointed or sharded one by one. Nothing here depends on devices, precision or training.

>>> import torch
>>> model = GPT2(GPT2Config(vocab_size=65, max_tokens=32, width=48, heads=3, layers=2))
>>> model(torch.zeros(4, 32, dtype=torch.int64)).shape
torch.Size([4, 32, 65])
"""

from __future__ import annotations

from flatout.models.bert import Bert, BertConfig, BertMaskedLM, BertOutput
from flatout.models.convnet import ConvNet, ConvNetConfig
from flatout.models.gpt2 import GPT2, GPT2Config
from flatout.models.mlp import MLP, MLPConfig
from flatout.models.recurrent import (
    CharacterGenerator,
    CharacterGeneratorConfig,
    RecurrentClassifier,
    RecurrentClassifierConfig,
)
from flatout.models.resnet import ResNet, ResNetConfig
from flatout.models.transformer import Seq2SeqConfig, Seq2SeqTransformer, TransformerConfig, TransformerLM

__all__ = [
    "GPT2",
    "MLP",
    "Bert",
    "BertConfig",
    "BertMaskedLM",
    "BertOutput",
    "CharacterGenerator",
    "CharacterGeneratorConfig",
    "ConvNet",
    "ConvNetConfig",
    "GPT2Config",
    "MLPConfig",
    "RecurrentClassifier",
    "RecurrentClassifierConfig",
    "ResNet",
    "ResNetConfig",
    "Seq2SeqConfig",
    "Seq2SeqTransformer",
    "TransformerConfig",
    "TransformerLM",
]
