"""Our options, a script, and the script's own arguments on one command line.

    flatout run --quiet train.py --help "two words" -- -x
                ours    ^ the first that is no option (or -m MODULE) ends ours; the rest goes through untouched

No parsing library is imported: `flatout run` runs the user's script in the process that does this.

>>> parse_options(["--quiet", "train.py", "--help"], [Option(name="--quiet", meaning="say nothing")])
({'--quiet': ''}, ['train.py', '--help'])
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flatout.errors import UsageError

HELP = "--help"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a verb that runs a script."""

    name: str
    """As typed: '--plan'."""
    meaning: str
    """Its line of help."""
    value: str = ""
    """What stands for its value in the help, such as FILE; '' for a switch."""


def split_target(arguments: Sequence[str], valued: Collection[str]) -> tuple[list[str], list[str]]:
    """(our options, the target). The target is [script, *its arguments] or ['-m', module, *its arguments].

    `valued` are our options that take the next word as their value.
    """
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return list(arguments[:position]), list(arguments[position + 1 :])
        if word.startswith("-m"):  # -mMODULE is -m MODULE, as Python has it
            module = [word.removeprefix("-m")] if word != "-m" else []
            return list(arguments[:position]), ["-m", *module, *arguments[position + 1 :]]
        if not word.startswith("-") or word == "-":
            return list(arguments[:position]), list(arguments[position:])
        position += 2 if word in valued else 1
    return list(arguments), []


def parse_options(arguments: Sequence[str], options: Sequence[Option]) -> tuple[dict[str, str], list[str]]:
    """({option: value, '' for a switch}, target); of an option given twice the last counts."""
    known = {option.name: option for option in options}
    own, target = split_target(arguments, _valued(options))
    chosen: dict[str, str] = {}
    words = iter(own)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in known:
            close = difflib.get_close_matches(name, [*known, HELP], 1)
            raise UsageError(f"no option {name}", remedy=f"did you mean {close[0]}?" if close else f"see {HELP}")
        if not known[name].value and equals:
            raise UsageError(f"{name} has the value {value!r}", limit="it is a switch and takes none")
        if known[name].value and not (value := value if equals else next(words, "")):
            raise UsageError(f"{name} has no value", remedy=f"write {name} {known[name].value}")
        chosen[name] = value
    return chosen, target


def refuse_others(option: str, options: Mapping[str, str], together: Sequence[str]) -> None:
    """What an option that only checks would ignore is a mistake."""
    if stray := [name for name in options if name != option and name not in together]:
        raise UsageError(f"{stray[0]} with {option}", limit=f"{option} only checks", remedy=f"leave {stray[0]} out")


def refuse_alone(given: Mapping[str, object]) -> None:
    """UsageError for an option that means something with --devices alone. given: option -> its value."""
    if stray := [option for option, value in given.items() if value]:
        raise UsageError(f"{stray[0]} without --devices", limit="it is for several devices", remedy="add --devices 2")


def refuse_guard(isolation: str, option: str) -> None:
    """option: by which a trial has several processes."""
    if isolation == "guard":
        raise UsageError(
            f"--isolation guard with {option}",
            limit="the processes of such a trial need a private copy of the files that they write",
            remedy="use --isolation auto",
        )


def on_cpu(device: str | None) -> bool:
    """Do ranks train on the CPU? UsageError for a single GPU: each rank has one of its own."""
    if device not in (None, "cpu"):
        raise UsageError(
            f"--device {device} with --devices", limit="each rank has a GPU of its own", remedy="leave --device out"
        )
    return device == "cpu"


def asks_for_help(arguments: Sequence[str], options: Sequence[Option]) -> bool:
    """True where --help is ours: before the script, and no option's value."""
    own, _ = split_target(arguments, _valued(options))
    return any(
        word == HELP and (position == 0 or own[position - 1] not in _valued(options))
        for position, word in enumerate(own)
    )


def _valued(options: Sequence[Option]) -> set[str]:
    return {option.name for option in options if option.value}
