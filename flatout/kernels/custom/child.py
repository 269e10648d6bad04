"""The process that runs the user's code, and tells its parent what it finds, one line of JSON at a time.

    {"at": "gradient", "case": {...}, "text": "...", "reproduce": "...", "seconds": 60}   before each call
    {"property": {...}}    {"speed": {...}}    {"note": "..."}    {"error": {...}}    {"done": true}

Lines go to the descriptor that was stdout; what the user's code prints goes to stderr. A call may crash or hang: the
parent knows from the last line which one it was.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import IO

import torch

from flatout.errors import FlatoutError, describe_error
from flatout.kernels.custom.cases import Case, draw_cases
from flatout.kernels.custom.definition import Definition, read_definition
from flatout.kernels.custom.drawn_inputs import draw, unguarded
from flatout.kernels.custom.extension_build import BUILD_SECONDS, Stage, watched_builds
from flatout.kernels.custom.result import KernelFailure, KernelProperty
from flatout.kernels.custom.session import Asked, Mode, Session, tell
from flatout.kernels.custom.stages import check_whole
from flatout.tracebacks import is_users_file

LOADING_SECONDS = 300.0
SANITIZED_CASES = 60


def main() -> None:
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    faulthandler.enable()
    asked: Asked = json.loads(sys.argv[1])
    sys.argv = [asked["target"]]
    warnings.simplefilter("ignore")
    try:
        definition = _loaded(asked, messages)
        if definition is not None:
            interprets = asked["device"] == "cpu" and _is_written_in_triton()
            session = Session(definition, asked, messages, interprets)
            _MODES[asked["mode"]](session)
            session.tell(done=True)
    except FlatoutError as error:
        tell(messages, error={"what": error.what, "limit": error.limit, "remedy": error.remedy})
    except Exception as error:  # a mistake of ours, not of the kernel
        tell(messages, broken=f"{describe_error(error)}\n{traceback.format_exc()}")
    finally:
        messages.close()


def _loaded(asked: Asked, messages: IO[str]) -> Definition | None:
    """The user's file, executed; None: an extension of it does not build, which is reported."""
    stages: list[tuple[Stage, str, float]] = []

    def watcher(stage: Stage, name: str) -> None:
        stages.append((stage, name, time.perf_counter()))
        limit = BUILD_SECONDS + 60.0 if stage == "building" else LOADING_SECONDS
        tell(messages, at="load", text=f"{stage} {name}", case=None, reproduce="", seconds=limit)

    tell(messages, at="load", text=f"loading {asked['target']}", case=None, reproduce="", seconds=LOADING_SECONDS)
    with watched_builds(watcher):
        try:
            definition = read_definition(asked["target"])
        except FlatoutError as error:
            if not any(stage == "failed" for stage, _, _ in stages):
                raise
            what = "; ".join(part for part in (error.what, error.limit, error.remedy) if part)
            failed = KernelProperty(name="build", verdict="failed", failure=KernelFailure(what=what), failed=1)
            tell(messages, property=failed.to_json())
            tell(messages, done=True)
            return None
    loaded = [name for stage, name, _ in stages if stage == "loaded"]
    if loaded:
        begun = [at for stage, _, at in stages if stage == "building"]
        ended = [at for stage, _, at in stages if stage == "built"]
        took = f" in {sum(ended) - sum(begun):.1f} s" if begun else " found in the cache"
        one = KernelProperty(name="build", verdict="passed", text=f"{', '.join(loaded)}{took}")
        tell(messages, property=one.to_json(), extensions=loaded)
    return definition


def _is_written_in_triton() -> bool:
    """Does a module of the user's hold something of Triton's? Triton itself may be loaded by torch."""
    own = [one for one in list(sys.modules.values()) if is_users_file(str(getattr(one, "__file__", None) or ""))]
    return any(_of_triton(value) for module in own for value in list(vars(module).values()))


def _of_triton(value: object) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else type(value).__module__
    return name.partition(".")[0] == "triton"


# after a crash, and under AddressSanitizer


def _narrow(session: Session) -> None:
    """The candidates in order: the parent sees at which one this process ends."""
    for data in session.asked["candidates"]:
        case = Case.from_json(data)
        session.starts(session.asked["at"], case)
        _call_once(session, case)


def _sanitize(session: Session) -> None:
    """The kernel alone, forwards and backwards: AddressSanitizer ends the process at its first mistake."""
    asked = session.asked
    if asked["candidates"]:
        cases = [Case.from_json(data) for data in asked["candidates"]]
    else:
        drawn = draw_cases(session.definition, seed=asked["seed"], count=asked["cases"], quick=asked["quick"])
        cases = drawn[:: max(1, len(drawn) // SANITIZED_CASES)]
    for case in cases:
        session.starts("sanitizer", case)
        _call_once(session, case)
    session.found("sanitizer", "passed", "no access outside of memory (AddressSanitizer)", cases=len(cases))


def _call_once(session: Session, case: Case) -> None:
    """Whatever comes of it. Without guard zones, in which AddressSanitizer would let a kernel read and write."""
    arguments = unguarded(draw(session.definition, case, session.device))
    leaves = [one.requires_grad_() for one in arguments if isinstance(one, torch.Tensor) and one.is_floating_point()]
    wants_gradient = session.definition.gradient is not False and not session.definition.mutates
    try:
        with torch.set_grad_enabled(wants_gradient):
            found = session.definition.kernel(*arguments)
        if wants_gradient and isinstance(found, torch.Tensor) and found.requires_grad:
            torch.autograd.grad(found, leaves, torch.ones_like(found), allow_unused=True)
    except Exception:  # the user's own code: what it raises has been reported before
        return


_MODES: dict[Mode, Callable[[Session], None]] = {"check": check_whole, "narrow": _narrow, "sanitize": _sanitize}

if __name__ == "__main__":
    main()
