"""Runs the untrusted script in a namespace where one directory is a tmpfs of a given size; prints what both saw.

python small_file_system.py DIRECTORY SIZE '{... what untrusted.py is asked ...}'
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from users_home import fill, give_to, take_snapshot

from flatout.script.isolation import kernel


def make_file_system(directory: str, size: str) -> None:
    bound = "64m" if size == "overlay" else size
    kernel.mount("small", directory, "tmpfs", 0, f"size={bound},mode=0755")
    if size == "overlay":
        layout = [Path(directory, name) for name in ("lower", "upper", "work")]
        for path in layout:
            path.mkdir()
        options = "lowerdir={},upperdir={},workdir={}".format(*layout)
        kernel.mount("small", directory, "overlay", 0, options)


def main() -> None:
    directory, size, asked_text = sys.argv[1:]
    asked = json.loads(asked_text)
    home = Path(asked["home"])
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        make_file_system(directory, size)
    except OSError as error:
        sys.exit(f"a private mount is refused: {error}")
    if not home.exists():
        fill(home)
    if asked["user"]:
        give_to(asked["user"], Path(directory))
    before = take_snapshot(home)
    untrusted = [sys.executable, str(Path(__file__).with_name("untrusted.py")), asked_text]
    ended = subprocess.run(untrusted, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(ended.stderr)
    print(json.dumps(json.loads(ended.stdout) | {"before": before, "after": take_snapshot(home)}))


if __name__ == "__main__":
    main()
