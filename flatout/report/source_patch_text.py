"""A source patch as a file that `patch -p1` and `git apply` take, and as a document for programs.

Both tools skip what stands before the first file: there, lines that begin with '#' say what each change gains, and what
of the plan is not in the patch. Each hunk has the gain of its changes in its heading, which the tools skip too.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from flatout.plan_choices import ChoiceValue
from flatout.report.document import document
from flatout.search.lines import ratio_text
from flatout.source_patch.result import Gain, LeftToRun, SourceChange, SourcePatch
from flatout.source_patch.unified_diff import header, hunk_text

KIND = "source patch"


def patch_bytes(patch: SourcePatch, command: Sequence[str]) -> bytes:
    """The whole file; command: how the script is called, without `python`."""
    lines = "".join(f"# {_one_line(line)}".rstrip() + "\n" for line in comment_lines(patch, command))
    gains = {one.choice: f"{_named(one.choice, one.value)}: {_short(one.gain)}" for one in patch.changes}
    parts = [lines.encode()]
    for file in patch.files:
        parts.append(header(file))
        parts += [hunk_text(hunk, _ascii("; ".join(gains[one] for one in hunk.choices))) for hunk in file.hunks]
    return b"".join(parts)


def comment_lines(patch: SourcePatch, command: Sequence[str]) -> list[str]:
    """What is in the patch and what is not, with what each is worth."""
    on = f" on {patch.machine}" if patch.machine else ""
    lines = [f"{patch.script} as flatout tune measured it{on}, torch {patch.torch_version or '(unknown)'}"]
    lines.append(f"the whole plan: {_long(patch.total)}")
    names = [_named(one.choice, one.value) for one in patch.changes]
    names += [_named(one.choice, one.value) for one in patch.left]
    width = max(map(len, names), default=0)
    for change in patch.changes:
        lines += ["", "in this patch:"] if change is patch.changes[0] else []
        lines += _change_lines(change, width)
    for left in patch.left:
        lines += ["", "not in this patch:"] if left is patch.left[0] else []
        lines += _left_lines(left, width, command)
    lines += ["", *(f"note: {text}" for text in patch.warnings)] if patch.warnings else []
    if patch.folder:
        lines += ["", f"to be applied in {patch.folder}"]
    return [*lines, ""]


def _change_lines(change: SourceChange, width: int) -> list[str]:
    head = f"  {_named(change.choice, change.value):<{width}}  {_long(change.gain)}"
    return [head, *(f"  {'':<{width}}  {note}" for note in change.notes)]


def _left_lines(left: LeftToRun, width: int, command: Sequence[str]) -> list[str]:
    head = f"  {_named(left.choice, left.value):<{width}}  {_long(left.gain)}"
    where = f"only under: flatout run {shlex.join(command)}"
    if left.command:
        where = f"the same with: {' '.join(_assigned(one) for one in left.command)} python {shlex.join(command)}"
    return [head, f"  {'':<{width}}  {left.reason}", f"  {'':<{width}}  {where}"]


def _assigned(setting: str) -> str:
    name, _, value = setting.partition("=")
    return f"{name}={shlex.quote(value)}" if value else f"{name}="


def _named(choice: str, value: ChoiceValue) -> str:
    return f"{choice} = {str(value).lower() if isinstance(value, bool) else value}"


def _short(gain: Gain) -> str:
    if gain.comparison is None:
        return "gain unknown"
    more = f" with {', '.join(gain.together_with)}" if gain.together_with else ""
    return f"{ratio_text(gain.comparison)}{more}"


def _long(gain: Gain) -> str:
    return f"gain unknown, because {gain.reason}" if gain.comparison is None else _short(gain)


def _ascii(text: str) -> str:
    return text.replace("±", "+-").encode("ascii", "replace").decode()


def _one_line(text: str) -> str:
    """Of a script's name or a reason: nothing that ends the comment or controls a terminal."""
    readable = text.encode("utf-8", "replace").decode()
    return "".join(letter if letter.isprintable() else "?" for letter in readable)


def patch_document(patch: SourcePatch, command: Sequence[str]) -> dict[str, object]:
    """Everything, for programs. `patch` is the text that is written without --json; bytes that are no UTF-8 are
    replaced in it."""
    payload = {
        "script": patch.script,
        "folder": patch.folder,
        "files": [{"name": _one_line(file.name), "hunks": len(file.hunks)} for file in patch.files],
        "changes": [one.to_json() for one in patch.changes],
        "left": [one.to_json() for one in patch.left],
        "total": patch.total.to_json(),
        "machine": patch.machine,
        "torch_version": patch.torch_version,
        "warnings": list(patch.warnings),
        "patch": patch_bytes(patch, command).decode("utf-8", "replace") if patch.files else None,
    }
    return document(KIND, payload)
