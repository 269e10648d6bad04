"""The bench's workloads by key, in the order of the table."""

from __future__ import annotations

from flatout.bench.inference import INFERENCE
from flatout.bench.training import TRAINING

_ORDER = ("resnet50-training", "bert-large-inference", "gpt2-generation", "compile", "gpt2-training", "bert-training")
"""First the table of the guides, then two more."""

QUICK = _ORDER[:3]
"""Those of a quick bench."""

WORKLOADS = dict(sorted(((one.key, one) for one in (*TRAINING, *INFERENCE)), key=lambda pair: _ORDER.index(pair[0])))
