"""A tokenizer from what a person types: `text.py:tokenizer`, or a Hugging Face folder.

A tokenizer is anything with `encode(text) -> ids` and `decode(ids) -> text`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flatout.errors import UsageError
from flatout.infer.model_source import load_object

_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def load_tokenizer(spec: str) -> Any:
    """The tokenizer that `spec` names. UsageError: nothing there, or it has no encode and decode."""
    if Path(spec).is_dir():
        return _from_folder(Path(spec))
    found = load_object(spec, "tokenizer")
    if callable(found) and not hasattr(found, "encode"):
        found = found()
    for needed in ("encode", "decode"):
        if not callable(getattr(found, needed, None)):
            limit = "a tokenizer has encode(text) -> ids and decode(ids) -> text"
            raise UsageError(f"{spec} is a {type(found).__name__} without {needed}", limit=limit)
    return found


def decode_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """ids -> text, such that a longer list's text begins with a shorter one's: spaces are left as they are."""
    if hasattr(tokenizer, "clean_up_tokenization_spaces"):  # of transformers
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return lambda ids: str(tokenizer.decode(ids))


def tokenizer_beside(model: str) -> Any | None:
    """That of a Hugging Face folder that holds one too; None for any other model."""
    folder = Path(model)
    return _from_folder(folder) if folder.is_dir() and any((folder / name).is_file() for name in _FILES) else None


def _from_folder(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in _FILES):
        raise UsageError(f"{folder} holds no tokenizer", limit=f"it has one of {', '.join(_FILES)}")
    try:
        import transformers
    except ImportError:
        what = f"{folder} is a Hugging Face tokenizer and transformers is not installed"
        raise UsageError(what, remedy="pip install transformers") from None
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever a broken folder makes it raise
        what = f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {error}"
        raise UsageError(what, remedy="load it in Python first") from error
