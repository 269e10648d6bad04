"""What is known of a model that was built but not run: the input of the checks in `model_checks`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from flatout.decoding import decode
from flatout.script.behaviour_seen import SourceLine
from flatout.script.source_facts import LayerFact


@dataclass(frozen=True, kw_only=True)
class UnregisteredSeen:
    """Modules or parameters in a plain Python container of a module."""

    path: str
    """'Net.layers'; that of an outermost module is its class."""
    container: str
    """'list'."""
    holds: tuple[str, ...]
    """Classes of what is in it and is registered nowhere: ('Linear', 'Linear')."""
    parameters: int
    """Trainable numbers that `model.parameters()` does not give."""
    line: SourceLine | None = None


@dataclass(frozen=True, kw_only=True)
class TensorSeen:
    """A tensor that is a plain attribute of a module."""

    path: str
    shape: tuple[int, ...]
    trained: bool
    """Was it made with requires_grad=True?"""
    line: SourceLine | None = None


@dataclass(frozen=True, kw_only=True)
class PairSeen:
    """Two layers of a Sequential of which the second takes what the first gives."""

    first: str
    second: str
    sizes: tuple[int, ...]
    """Features in, between and out; of a bias: its numbers."""
    saved_bytes: int
    """How much smaller the parameters are without what has no effect; 0 where they are not."""
    line: SourceLine | None = None


@dataclass(frozen=True, kw_only=True)
class LastLayer:
    """The layer whose output is the model's."""

    path: str
    kind: str
    """'Softmax'."""
    line: SourceLine | None = None


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model as it was built. Numbers and bytes count each parameter once, however many modules share it."""

    kind: str
    """Its class."""
    parameters: int
    trainable: int
    bytes_by_dtype: Mapping[str, int]
    """Of parameters: {'float32': 4096}."""
    buffer_bytes: int | None
    """None where a lazy layer's have no shape yet."""
    training: bool
    """Is it in training mode?"""
    unregistered: tuple[UnregisteredSeen, ...] = ()
    tensors: tuple[TensorSeen, ...] = ()
    needless_biases: tuple[PairSeen, ...] = ()
    linear_pairs: tuple[PairSeen, ...] = ()
    last: LastLayer | None = None
    convolutions: int = 0
    """2-d ones whose weights have a format to choose: a 1x1 convolution of one channel has none."""
    channels_last: bool = False
    """Is any of these in channels_last already?"""
    by_hand: tuple[LayerFact, ...] = ()
    """Classes of its modules that compute what a layer of torch.nn computes."""
    without_source: tuple[str, ...] = ()
    """Paths of its modules that torch.jit has compiled, which no check sees into."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> ModelFacts:
        return decode(cls, data)
