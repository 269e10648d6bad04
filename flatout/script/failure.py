"""What happens when a script fails under a plan, in one place.

- A lever that cannot be applied is left off: nothing has run under it, and the run goes on without it.
- An exception from the model, the backward pass or the optimizer while levers are on passes through unchanged. The
  script may have raised it on purpose (a hook that stops the forward to extract features), may catch it, or may fail.
  Nothing is retried: by then data, random numbers and state have been consumed.
- If the script fails, it does so with its own traceback and exit status, and a message follows: the levers that were
  on, first those that act where it failed, and the exact commands to run without them.
- In a trial the process has failed, so that lever is dropped with the reason; the next trial restarts the script.
"""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Mapping, Sequence

from flatout.levers.lever import Choice

_PLACES = (
    ("optimizer", ("/torch/optim/",)),
    ("backward", ("/torch/autograd/", "/torch/_functorch/_aot_autograd/")),
    ("forward", ("/torch/nn/modules/module.py", "/torch/_dynamo/", "/torch/_inductor/")),
    ("data", ("/torch/utils/data/",)),
)
_COMPILER = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/")
_WORDS = {"optimizer": "optimizer's step", "backward": "backward pass", "forward": "model", "data": "loader"}


def explain_failure(
    error: BaseException, choices: Sequence[Choice], options: Mapping[str, str], target: Sequence[str]
) -> str:
    """The message for a script that failed with `error` while `choices` were on; '' where none were.

    options: of `flatout run`, as given; target: the script with its arguments.
    """
    if not choices:
        return ""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    part = place_of_failure(files)
    ordered = sorted(choices, key=lambda choice: -_suspicion(choice, part, files))
    first = ordered[0]
    where = f" in the {_WORDS[part]}" if part else ""
    names = ", ".join(choice.label for choice in ordered)
    lines = [f"flatout: the script failed{where} under its plan ({names}). If the plan is the cause, run"]
    if len(ordered) > 1:
        lines.append(f"    {_command(options, first.field, target)}    (without {first.label})")
    kept = {name: value for name, value in options.items() if name not in ("--plan", "--without", "--trust-plan")}
    lines.append(f"    {_command({'--no-plan': ''} | kept, '', target)}    (without the plan)")
    return "\n".join(lines)


def place_of_failure(files: Sequence[str]) -> str:
    """'forward', 'backward', 'optimizer' or 'data' by a traceback's files, outermost first; '' for none of them."""
    for file in files:
        for part, folders in _PLACES:
            if any(folder in file for folder in folders):
                return part
    return ""


def _suspicion(choice: Choice, part: str, files: Sequence[str]) -> int:
    lever = choice.lever
    if lever.compiles and any(folder in file for file in files for folder in _COMPILER):
        return 3
    acts_there = {
        "forward": lever.acts_on_forward,
        "backward": lever.acts_on_forward,
        "optimizer": lever.plan_field == "optimizer",
        "data": lever.switch == "loader",
    }
    if acts_there.get(part, False):
        return 2
    return int(lever.acts_on_forward)


def _command(options: Mapping[str, str], without: str, target: Sequence[str]) -> str:
    words = ["flatout", "run"]
    given = dict(options)
    if without:
        given["--without"] = ",".join(name for name in (given.get("--without", ""), without) if name)
    for name, value in given.items():
        words += [name, value] if value else [name]
    return shlex.join([*words, *target])
