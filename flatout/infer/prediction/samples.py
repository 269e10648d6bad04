"""One input of the user as tensors: its kind, its length, and which others it can share a batch with.

    tensor, array, list of numbers    [tokens] or [tokens, features], or of fixed size, as an image [3, 224, 224]
    dict                              keywords of the model's call: {"input_ids": [...], "token_type_ids": [...]}
    tuple                             arguments of the model's call

No input has a batch dimension. Ids, and tensors of two dimensions, have a length: their first size. A vector of numbers
is of fixed size, but for a model that takes a mask (of audio, say).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.infer.prediction.calling import Calling

KINDS = "an input is a tensor, an array, a list of numbers, or a dict or tuple of these, without a batch dimension"


@dataclass(frozen=True, eq=False)
class Sample:
    """Tensors by keyword or place (an int), of memory of its own: an iterator may refill the buffer that it yields."""

    index: int
    tensors: dict[str | int, Tensor]
    length: int | None
    """Tokens; None: of fixed size."""
    kind: Hashable
    """Equal for samples that may share a padded batch: names, dtypes and all sizes but the length."""
    mask_dtype: torch.dtype | None = None
    """The input came with a mask that marks every token as real: the batch's is made in its place, in this dtype."""

    def like(self, tensors: dict[str | int, Tensor], length: int | None) -> Sample:
        """Of the same kind with other content."""
        return Sample(self.index, tensors, length, self.kind, self.mask_dtype)

    @property
    def shape(self) -> Hashable:
        """Equal for samples that may be stacked as they are."""
        return self.kind, self.length

    @property
    def tokens(self) -> int:
        """What it counts towards a budget of tokens."""
        return 1 if self.length is None else self.length

    @property
    def numbers(self) -> int:
        """In all its tensors."""
        return sum(one.numel() for one in self.tensors.values())

    @property
    def is_sequence(self) -> bool:
        """Is it made of ids, or of vectors? Not an input of fixed size, nor a single vector of numbers."""
        several = any(one.dim() > 1 or not one.is_floating_point() for one in self.tensors.values())
        return self.length is not None and several


def read_sample(index: int, value: object, calling: Calling) -> Sample:
    """The sample; UsageError says what is wrong with the input."""
    if isinstance(value, UsageError):  # the source of the inputs could not read this one
        raise value
    named = _named(value, calling)
    if not named:
        raise UsageError(f"the input is an empty {type(value).__name__}", limit=KINDS)
    tensors = {name: _tensor(name, part) for name, part in named.items()}
    if all(one.dim() == 2 and one.shape[0] == 1 and not one.is_floating_point() for one in tensors.values()):
        tensors = {name: one[0] for name, one in tensors.items()}  # as tokenisers give it: [1, tokens]
    mask_dtype = _take_full_mask(tensors, calling) if len(tensors) > 1 and calling.mask_name in tensors else None
    length = _length(tensors, calling)
    _check(tensors, length, calling)
    kind: tuple[Hashable, ...] = tuple(
        (name, one.dtype, one.dim(), tuple(one.shape[1:]) if _is_sequence(one, length) else tuple(one.shape))
        for name, one in tensors.items()
    )
    return Sample(index, tensors, length, kind if mask_dtype is None else (*kind, mask_dtype), mask_dtype)


def _named(value: object, calling: Calling) -> dict[str | int, object]:
    if isinstance(value, Mapping):
        return {str(name): part for name, part in value.items() if part is not None}
    if isinstance(value, tuple):
        return dict(enumerate(value))
    if value is None:
        raise UsageError("the input is None", limit=KINDS)
    return {0 if calling.input_name is None else calling.input_name: value}


def _tensor(name: str | int, part: object) -> Tensor:
    try:
        if isinstance(part, np.ndarray):  # torch takes no negative strides, as of a flipped image, nor foreign bytes
            part = np.array(part, dtype=part.dtype.newbyteorder("="), order="C")
        tensor = part.detach().clone() if isinstance(part, Tensor) else torch.tensor(part, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        what = f"input {name!r} is {_shown(part)}" if not isinstance(name, int) else f"the input is {_shown(part)}"
        remedy = "tokenise texts first" if isinstance(part, str) else ""
        raise UsageError(what, limit=KINDS, remedy=remedy) from error
    if tensor.is_nested:
        remedy = "pass what it holds as an input each"
        raise UsageError("the input is a nested tensor", limit=KINDS, remedy=remedy)
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise UsageError(f"the input is a tensor of layout {kind}", limit=KINDS, remedy="pass input.to_dense()")
    if tensor.is_meta:
        limit, remedy = "predict computes with its values", "pass a tensor that holds some"
        raise UsageError("the input is on the meta device", limit=limit, remedy=remedy)
    if tensor.dtype in (torch.uint8, torch.uint16, torch.int8, torch.int16, torch.uint32) and tensor.dim() == 1:
        tensor = tensor.long()  # tokens as files hold them
    return tensor


def whole_numbers_hint(error: BaseException, sample: Sample) -> str:
    """The remedy where a model does not compute with the whole numbers that it was given; '' for other errors."""
    first = next(iter(sample.tensors.values()))
    number = first.is_floating_point() or first.is_complex()
    if number or not isinstance(error, RuntimeError) or "type" not in str(error):
        return ""
    return "whole numbers are given to the model as they are, in one dimension as ids (int64): save others as float32"


def _shown(part: object) -> str:
    text = repr(part)
    return f"{type(part).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def _take_full_mask(tensors: dict[str | int, Tensor], calling: Calling) -> torch.dtype | None:
    """A mask that marks every token as real is taken out, as the batch's will be made; its dtype, None if there is
    no such mask."""
    given = tensors[calling.mask_name]  # type: ignore[index]
    if given.dim() != 1 or len(given) != _length(tensors, calling):
        return None
    if not bool((given == 0).all() if calling.mask_style == "padding" else (given == 1).all()):
        return None
    del tensors[calling.mask_name]  # type: ignore[arg-type]
    return given.dtype


def _length(tensors: dict[str | int, Tensor], calling: Calling) -> int | None:
    def has_one(tensor: Tensor) -> bool:
        number = tensor.is_floating_point() or tensor.is_complex()
        vector = tensor.dim() == 1 and number and calling.mask_name is None
        return 1 <= tensor.dim() <= 2 and not vector

    return next((one.shape[0] for one in tensors.values() if has_one(one)), None)


def _is_sequence(tensor: Tensor, length: int | None) -> bool:
    return length is not None and 1 <= tensor.dim() <= 2 and tensor.shape[0] == length


def _check(tensors: dict[str | int, Tensor], length: int | None, calling: Calling) -> None:
    main = next(iter(tensors.values()))
    if length == 0 or main.numel() == 0:
        raise UsageError(f"the input is {list(main.shape)}", limit="it must hold at least 1 token")
    if length is not None and calling.longest is not None and length > calling.longest:
        limit = f"the model has positions for {calling.longest}"
        raise UsageError(f"the input has {length} tokens", limit=limit, remedy="cut it, or split it into parts")
    name = calling.input_name
    if calling.vocabulary is not None and (name is None or name in tensors):
        _check_ids(main if name is None else tensors[name], len(tensors), calling)


def _check_ids(tokens: Tensor, inputs: int, calling: Calling) -> None:
    """An id past the vocabulary ends everything on a GPU. With a vocabulary that is only guessed, the model itself says
    what it takes, but there."""
    if calling.vocabulary is None or (not calling.vocabulary_sure and (calling.checks_itself or inputs > 1)):
        return
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool:
        if not calling.vocabulary_sure:
            return
        remedy = "pass whole numbers, as with .long()"
        raise UsageError(f"the input is {tokens.dtype} {list(tokens.shape)}", limit="tokens are ids", remedy=remedy)
    check_in_vocabulary(tokens, calling.vocabulary)


def check_in_vocabulary(tokens: Tensor, vocabulary: int) -> None:
    """UsageError names the first id that is not in it."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        place = int((tokens == wrong).nonzero()[0][0])
        limit = f"ids are 0 to {vocabulary - 1}"
        raise UsageError(f"token {place} is {wrong}", limit=limit, remedy="use the tokeniser of this model")


LOUD = 4.0
"""Times the largest value: no maximum, norm or sum is unmoved by it."""


_NOT_COMPUTED_IN = (torch.uint16, torch.uint32, torch.uint64)


def disturbed(sample: Sample, how: float) -> Sample:
    """The same shapes; the first tensor has other values. `how` > 1: larger numbers, below 1: smaller ones."""
    first, *rest = sample.tensors
    tensors = {first: _other(sample.tensors[first], how), **{name: sample.tensors[name] for name in rest}}
    return sample.like(tensors, sample.length)


def _other(tensor: Tensor, how: float) -> Tensor:
    if tensor.dtype.itemsize == 1 and tensor.is_floating_point():  # torch does not compute in 8 bits
        return _other(tensor.float(), how).to(tensor.dtype)
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * how + 0.25
    if tensor.dtype is torch.bool or not tensor.numel():
        return tensor
    if tensor.dtype in _NOT_COMPUTED_IN:
        return _other(tensor.long(), how).to(tensor.dtype)
    mirrored = tensor.max() + tensor.min() - tensor
    if how < 1 and not torch.equal(tensor.flip(0), tensor):
        return tensor.flip(0)
    if torch.equal(mirrored, tensor):
        return tensor - 1 if int(tensor.min()) > 0 else tensor + 1
    return mirrored


def shortened(sample: Sample, length: int) -> Sample:
    """Its first `length` tokens."""
    assert sample.length is not None, "an input of fixed size has no tokens"
    cut = {
        name: one[:length].clone() if 1 <= one.dim() <= 2 and one.shape[0] == sample.length else one
        for name, one in sample.tensors.items()
    }
    return sample.like(cut, length)


class Noise:
    """Content of the padding while it is tested: large values, different each time."""

    def __init__(self, calling: Calling, seed: int) -> None:
        self._vocabulary = calling.vocabulary
        self._generator = torch.Generator().manual_seed(seed)

    def like(self, part: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Of the dtype of `part`, a real sample."""
        if part.is_floating_point():
            size = LOUD * float(part.double().abs().nan_to_num(0.0, 0.0, 0.0).max()) + 1.0
            drawn = torch.rand(shape, generator=self._generator, dtype=torch.float32, device="cpu") + 0.5
            signs = self._whole_numbers(0, 1, shape) * 2 - 1
            return (drawn * signs * size).to(part.dtype)
        if part.dtype is torch.bool:
            return self._whole_numbers(0, 1, shape).bool()
        if part.is_complex():
            drawn = torch.stack([self.like(torch.view_as_real(part), (2, *shape))[one] for one in (0, 1)], -1)
            return torch.view_as_complex(drawn).to(part.dtype)
        low, high = (int(one) for one in part.long().aminmax())
        if self._vocabulary is not None and low >= 0 and high < self._vocabulary:
            low, high = 0, self._vocabulary - 1
        return self._whole_numbers(low, high, shape).to(part.dtype)

    def _whole_numbers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self._generator, device="cpu")
