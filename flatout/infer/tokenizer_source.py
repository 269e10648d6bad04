"""A tokenizer from a command-line argument: `text.py:tokenizer`, or a Hugging Face folder.

A tokenizer is anything with `encode(text) -> ids` and `decode(ids) -> text`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeGuard

from flatout.errors import FlatoutError, UsageError, describe_error
from flatout.infer.generation.token_ids import whole_number
from flatout.infer.model_source import called, load_object
from flatout.plan_document import short


class Encoding(Protocol):
    """What a tokenizer of the tokenizers library encodes to."""

    @property
    def ids(self) -> list[int]: ...


class Tokenizer(Protocol):
    """What a tokenizer must have."""

    def encode(self, text: str, /) -> Iterable[int] | Encoding: ...

    def decode(self, ids: list[int], /) -> str: ...


_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names. UsageError: nothing there, or it has no encode and decode."""
    if Path(spec).is_dir():
        return _from_folder(Path(spec))
    found = load_object(spec, "tokenizer")
    if isinstance(found, type) or (callable(found) and not hasattr(found, "encode")):
        found = called(found, spec, "tokenizer")
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
_METHODS_GIVE = "encode(text) gives token ids, and decode(ids) a text"


def _is_tokenizer(found: object) -> TypeGuard[Tokenizer]:
    return all(callable(getattr(found, name, None)) for name in _METHODS)


def encode_of(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """text -> ids, also for a tokenizer of the tokenizers library, which encodes to an object that holds them.

    UsageError for a text that it cannot encode (a character that it does not know), and for what are no ids.
    """

    def encode(text: str) -> list[int]:
        try:
            found = tokenizer.encode(text)
            given = list(found.ids if hasattr(found, "ids") else found)
        except FlatoutError:
            raise
        except Exception as error:  # the user's own code
            what = f"the tokenizer cannot encode {short(text)}: {describe_error(error)}"
            raise UsageError(what, limit=_METHODS_GIVE, remedy="leave out what it does not know") from error
        ids = [number for one in given if (number := whole_number(one)) is not None]
        if len(ids) < len(given):
            wrong = next(one for one in given if whole_number(one) is None)
            what = f"the tokenizer encodes {short(text)} to {short(wrong)}, of type {type(wrong).__name__}"
            raise UsageError(what, limit=_METHODS_GIVE)
        return ids

    return encode


def decode_of(tokenizer: Tokenizer) -> Callable[[list[int]], str]:
    """ids -> text, where the text of a prefix is a prefix of the text: spaces are not cleaned up.

    UsageError for ids that it cannot decode: a model may have more of them than its tokenizer.
    """

    method: Callable[..., object] = tokenizer.decode
    options = {}
    if hasattr(tokenizer, "clean_up_tokenization_spaces"):  # one of transformers
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}

    def decode(ids: list[int]) -> str:
        try:
            return str(method(ids, **options))
        except FlatoutError:
            raise
        except Exception as error:  # the user's own code
            what = f"the tokenizer cannot decode the ids {short(ids)}: {describe_error(error)}"
            remedy = "use the tokenizer that belongs to the model, or suppress_tokens=[...] for ids that it lacks"
            raise UsageError(what, limit=_METHODS_GIVE, remedy=remedy) from error

    return decode


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
