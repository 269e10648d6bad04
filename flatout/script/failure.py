"""What happens when a script fails under a plan, in one place.

- A lever that cannot be applied is left off: nothing has run under it, and the run goes on without it.
- An exception that leaves the model, the backward pass or the optimizer while levers are on goes its way untouched. The
  script may have raised it by intent (features taken by a hook that stops the forward), may catch it, or may die of it.
  Nothing is tried again: by then data, random numbers and state have been consumed.
- If the script dies of it, it does so with its own traceback and exit status, and this message follows: the levers that
  were on, those first that act where it failed, and the exact commands to run without them.
- In a trial the process has failed, so that lever is dropped with the reason; the next starts the script anew.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

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
    """The message for a script that died of `error` while `choices` were on; '' where none was.

    options: of `flatout run`, as given; target: the script with its arguments.
    """
    if not choices:
        return ""
    files = list(_files(error))
    part = place_of_failure(files)
    ordered = sorted(choices, key=lambda choice: -_suspicion(choice, part, files))
    first = ordered[0]
    where = f" in the {_WORDS[part]}" if part else ""
    names = ", ".join(choice.label for choice in ordered)
    lines = [f"flatout: the script failed{where} under its plan ({names}). If the plan is the cause, run"]
    if len(ordered) > 1:
        lines.append(f"    {_command(options, first.field, target)}    (without {first.label})")
    lines.append(f"    {_command({'--no-plan': ''} | _reporting(options), '', target)}    (without the plan)")
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


def _reporting(options: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if name in ("--report", "--no-report", "--quiet")}


def _files(error: BaseException) -> Iterator[str]:
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
