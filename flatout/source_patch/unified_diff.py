"""The hunks of a unified diff, as `patch -p1` and `git apply` take them.

Lines end at a line feed and nowhere else, so a carriage return belongs to its line: files with CRLF, form feeds or any
encoding are compared byte for byte.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence

from flatout.source_patch.result import Hunk, PatchedFile

CONTEXT_LINES = 3
NO_NEWLINE = b"\\ No newline at end of file\n"
Mark = tuple[str, int, int]
"""(choice, its first line in the old file, its last line), from 1."""


def hunks(old: bytes, new: bytes, marks: Sequence[Mark]) -> tuple[Hunk, ...]:
    """What differs, with the choices that have a line there."""
    before, after = _lines(old), _lines(new)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    found = []
    for group in matcher.get_grouped_opcodes(CONTEXT_LINES):
        first, last = group[0], group[-1]
        lines: list[bytes] = []
        for kind, old_from, old_to, new_from, new_to in group:
            if kind == "equal":
                lines += [_marked(b" ", line) for line in before[old_from:old_to]]
                continue
            lines += [_marked(b"-", line) for line in before[old_from:old_to]]
            lines += [_marked(b"+", line) for line in after[new_from:new_to]]
        here = [choice for choice, begin, end in marks if begin <= last[2] + 1 and end >= first[1] + 1]
        found.append(
            Hunk(
                old_start=first[1],
                old_count=last[2] - first[1],
                new_start=first[3],
                new_count=last[4] - first[3],
                lines=tuple(lines),
                choices=tuple(dict.fromkeys(here)),
            )
        )
    return tuple(found)


def header(file: PatchedFile) -> bytes:
    """The two lines that name the file."""
    return b"--- " + quoted(f"a/{file.name}") + b"\n+++ " + quoted(f"b/{file.name}") + b"\n"


def hunk_text(hunk: Hunk, heading: str) -> bytes:
    """The hunk with a heading of printable ASCII, which tools skip."""
    place = f"@@ -{_range(hunk.old_start, hunk.old_count)} +{_range(hunk.new_start, hunk.new_count)} @@ {heading}"
    return place.rstrip().encode() + b"\n" + b"".join(hunk.lines)


def quoted(name: str) -> bytes:
    """A file name as git writes it: in C's notation where it has control characters, quotes or bytes that are no
    UTF-8; with a tab after it where it has spaces."""
    raw = os.fsencode(name)
    try:
        raw.decode("utf-8")
        plain = not any(byte < 0x20 or byte in (0x22, 0x5C, 0x7F) for byte in raw)
    except UnicodeDecodeError:
        plain = False
    if plain:
        return raw + (b"\t" if b" " in raw else b"")
    return b'"' + b"".join(_escaped(byte) for byte in raw) + b'"'


def _escaped(byte: int) -> bytes:
    if byte in (0x22, 0x5C):
        return b"\\" + bytes([byte])
    return bytes([byte]) if 0x20 <= byte < 0x7F else f"\\{byte:03o}".encode()


def _lines(text: bytes) -> list[bytes]:
    return [line + b"\n" for line in text.split(b"\n")[:-1]] + [line for line in text.split(b"\n")[-1:] if line]


def _marked(sign: bytes, line: bytes) -> bytes:
    return sign + line if line.endswith(b"\n") else sign + line + b"\n" + NO_NEWLINE


def _range(start: int, count: int) -> str:
    """Of an empty range, the line before it is named."""
    first = start + 1 if count else start
    return f"{first}" if count == 1 else f"{first},{count}"
