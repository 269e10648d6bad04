"""Generated texts for people, as a JSON document and as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from flatout.errors import UsageError
from flatout.infer.generation.generated import Generation
from flatout.report.document import document


def generation_document(made: Generation) -> dict[str, object]:
    """Everything: tokens, texts, reasons, figures."""
    return document("generation", made.to_json())


def generation_text(made: Generation) -> str:
    """Every prompt's text, or its token ids without a tokenizer, under a line that names the prompt."""
    parts = []
    for index, (tokens, reason) in enumerate(zip(made.tokens, made.reasons, strict=True)):
        parts.append(f"--- prompt {index} ({reason})")
        parts.append(made.texts[index] if made.texts is not None else " ".join(map(str, tokens)))
    return "\n".join(parts)


def write_lines(path: Path, made: Generation) -> None:
    """One JSON object a prompt, in their order: prompt, tokens, text (null without a tokenizer), reason."""
    texts: Sequence[str | None] = made.texts or [None] * len(made.tokens)
    rows = zip(made.tokens, texts, made.reasons, strict=True)
    lines = [
        json.dumps({"prompt": index, "tokens": tokens, "text": text, "reason": reason}, ensure_ascii=False)
        for index, (tokens, text, reason) in enumerate(rows)
    ]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", remedy="name a place you may write") from error
