"""A tokenizer from a command-line argument: `text.py:tokenizer`, or a Hugging Face folder.

A tokenizer is anything with `encode(text) -> ids` and `decode(ids) -> text`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeGuard

from flatout.errors import UsageError
from flatout.infer.model_source import load_object


class Encoding(Protocol):
    """What a tokenizer of the tokenizers library encodes to."""

    @property
    def ids(self) -> list[int]: ...


class Tokenizer(Protocol):
    """What a tokenizer must have."""

    def encode(self, text: str, /) -> Iterable[int] | Encoding: ...

    def decode(self, ids: list[int], /) -> str: ...


class _HuggingFaceTokenizer(Protocol):
    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names. UsageError: nothing there, or it has no encode and decode."""
    if Path(spec).is_dir():
        return _from_folder(Path(spec))
    found = load_object(spec, "tokenizer")
    if callable(found) and not hasattr(found, "encode"):
        found = found()
    return as_tokenizer(found, spec)


def as_tokenizer(found: object, name: str = "tokenizer") -> Tokenizer:
    """The same object. UsageError if it has no encode or no decode; name: what the user called it."""
    if not _is_tokenizer(found):
        missing = next(method for method in _METHODS if not callable(getattr(found, method, None)))
        limit = "a tokenizer has encode(text) -> ids and decode(ids) -> text"
        remedy = "load it first, as with AutoTokenizer.from_pretrained(...)" if isinstance(found, str) else ""
        raise UsageError(f"{name} is a {type(found).__name__} without {missing}", limit=limit, remedy=remedy)
    return found


_METHODS = ("encode", "decode")


def _is_tokenizer(found: object) -> TypeGuard[Tokenizer]:
    return all(callable(getattr(found, name, None)) for name in _METHODS)


def _is_hugging_face(tokenizer: object) -> TypeGuard[_HuggingFaceTokenizer]:
    return hasattr(tokenizer, "clean_up_tokenization_spaces")


def encode_of(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """text -> ids, also for a tokenizer of the tokenizers library, which encodes to an object that holds them."""

    def encode(text: str) -> list[int]:
        found = tokenizer.encode(text)
        return list(found.ids if hasattr(found, "ids") else found)

    return encode


def decode_of(tokenizer: Tokenizer) -> Callable[[list[int]], str]:
    """ids -> text, where the text of a prefix is a prefix of the text: spaces are not cleaned up."""
    if _is_hugging_face(tokenizer):
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return lambda ids: str(tokenizer.decode(ids))


def tokenizer_beside(model: str) -> Tokenizer | None:
    """The tokenizer in a Hugging Face model folder; None if there is none, or for another kind of model."""
    folder = Path(model)
    return _from_folder(folder) if folder.is_dir() and any((folder / name).is_file() for name in _FILES) else None


def _from_folder(folder: Path) -> Tokenizer:
    if not any((folder / name).is_file() for name in _FILES):
        raise UsageError(f"{folder} holds no tokenizer", limit=f"it has one of {', '.join(_FILES)}")
    try:
        import transformers
    except ImportError:
        what = f"{folder} is a Hugging Face tokenizer and transformers is not installed"
        raise UsageError(what, remedy="pip install transformers") from None
    try:
        found = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever a broken folder makes it raise
        what = f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {error}"
        raise UsageError(what, remedy="load it in Python first") from error
    assert _is_tokenizer(found), "transformers gives its tokenizers both methods"
    return found
