"""What files that people share leave out: arguments, home directories and user names.

Host names are never recorded. What a script itself prints or raises is only searched for paths.

>>> without_private({"script": {"name": "train.py", "arguments": ["--key", "s3cret"]}})["script"]["arguments"]
>>> arguments_digest(["--epochs", "3"]) == arguments_digest(("--epochs", "3"))
True
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence

LEFT_OUT = "ARGUMENTS"
"""Stands for the arguments in a command."""


def arguments_digest(arguments: Sequence[str]) -> str:
    """Tells whether two runs had the same arguments without saying which."""
    text = json.dumps(list(arguments))
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def without_private(document: Mapping[str, object]) -> dict[str, object]:
    """A document with `script.arguments` as a digest, commands without their arguments, and home directories as '~'."""
    script = document.get("script")
    if not isinstance(script, Mapping) or not script.get("arguments"):
        return {key: _replaced(value, {}) for key, value in document.items()}
    arguments = script["arguments"]
    command = [*shlex.split(script["name"])] if script["name"].startswith("-m ") else [script["name"]]
    named = {shlex.join([*command, *arguments]): shlex.join(command) + f" {LEFT_OUT}"}
    hidden = {**script, "arguments": None, "arguments_digest": arguments_digest(arguments)}
    return {key: _replaced(value, named) for key, value in {**document, "script": hidden}.items()}


def without_home(text: str) -> str:
    """The text with '~' for this user's home directory, and USER for their name as a part of another path."""
    for home in _homes():
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    user = _user()
    return re.sub(rf"(?<=/){re.escape(user)}(?=/)", "USER", text) if user else text


def with_home(path: str) -> str:
    """The path that without_home made shorter."""
    return os.path.expanduser(path) if path.startswith("~/") else path


def _replaced(value: object, commands: Mapping[str, str]) -> object:
    if isinstance(value, str):
        for command, short in commands.items():
            value = value.replace(command, short)
        return without_home(value)
    if isinstance(value, Mapping):
        return {key: _replaced(one, commands) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(one, commands) for one in value]
    return value


def _homes() -> list[str]:
    """As it is named and as it is: a link may lead there. The longer first, as one may lie in the other."""
    home = os.path.expanduser("~")
    found = {home.rstrip("/"), os.path.realpath(home).rstrip("/")}
    return sorted((one for one in found if one.startswith("/")), key=len, reverse=True)


def _user() -> str:
    """'' where unknown."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError, ImportError):  # the user is not in the password file: containers run so
        return ""
    return "" if name == "root" else name
