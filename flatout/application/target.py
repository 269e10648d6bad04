"""A script with its arguments, as functions of the library are given one."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flatout.arguments import as_path, wrong
from flatout.script.entry import Target


def as_target(script: str | os.PathLike[str], arguments: Sequence[str] = (), *, module: bool = False) -> Target:
    """module: `script` is the name of a module, as after `python -m`. Raises UsageError for what is no command line."""
    if isinstance(arguments, str):
        raise wrong("arguments", arguments, "it is a list of words", 'for example ["--lr", "0.1"]')
    words = tuple(os.fspath(word) if isinstance(word, os.PathLike) else word for word in arguments)
    for word in words:
        if not isinstance(word, str):
            raise wrong("an argument", word, "each of them is a text", "write numbers as texts, such as str(0.1)")
    as_path(script, "script")
    name = os.fspath(script)  # as it was given: './train.py' stays so
    return Target(module=name, arguments=words) if module else Target(path=name, arguments=words)
