"""The whole check, stage by stage: each tells what it finds as a property, a mistake as its smallest case."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flatout.errors import MachineError, UsageError
from flatout.kernels.custom.cases import Case, case_text, draw_cases, nonfinite_cases
from flatout.kernels.custom.definition import Definition
from flatout.kernels.custom.footprint import elements
from flatout.kernels.custom.kernel_calls import Kind, Problem, ReferenceFails, forward_outcome, forward_problem
from flatout.kernels.custom.result import KernelFailure
from flatout.kernels.custom.session import Session, tell_failure
from flatout.kernels.custom.speed import speed_of, timed_case
from flatout.kernels.custom.torch_checks import (
    OF_COMPILING,
    OF_GRADIENTS,
    OPERATOR_TESTS,
    NotSupported,
    autocast_problem,
    compiled_problem,
    gradient_problem,
    operator_failures,
)
from flatout.kernels.native import cpp_command
from flatout.machine.detect import detect
from flatout.machine.device import device_name
from flatout.machine.kept_ceilings import load_ceilings

OF_MEMORY: tuple[Kind, ...] = ("writes outside", "reads outside", "modifies an input", "shares memory")
FORWARD_SECONDS, NONFINITE_SECONDS, GRADIENT_SECONDS = 60.0, 20.0, 40.0
"""Of a stage; in a quick check a quarter."""
GRADIENT_CASES, GRADIENT_ELEMENTS = 40, 1 << 16
COMPILE_SECONDS, TIMING_SECONDS = 600.0, 300.0
"""Of a call that compiles, and of one at the sizes that are timed."""

TIMED, WRONG = "timed sizes", "a wrong kernel's time says nothing"


def check_whole(session: Session) -> None:
    """Every stage, in order."""
    asked = session.asked
    quick = session.quick or session.interprets_triton  # which takes a millisecond for each operation
    cases = draw_cases(session.definition, seed=asked["seed"], count=asked["cases"], quick=quick)
    if not cases:
        raise UsageError("no case can be drawn", limit="sizes and inputs leave none", remedy="allow more sizes")
    right = _forward(session, cases)
    if not right.cases:
        return  # nothing that could be said of the rest would be of interest
    are_passed_on = _nonfinite(session, nonfinite_cases(session.definition, right.cases, quick=quick))
    has_gradient = _gradient(session, right.cases)
    ordinary = [one for one in right.cases if elements(session.definition, one.sizes) > 0 and one.values == "normal"]
    ordinary = ordinary or right.cases
    compiles = _compile(session, ordinary)
    _autocast(session, ordinary)
    _operator(session, ordinary, has_gradient=has_gradient, compiles=compiles)
    if not asked["timing"]:
        session.tell(speed_reason="not asked for")
    elif not right.all_are or not are_passed_on:
        session.tell(speed_reason=WRONG)
    elif session.interprets_triton:
        session.tell(speed_reason="Triton's interpreter runs it in Python, so its time says nothing of a GPU")
    else:
        _speed(session)


# forward


@dataclass(frozen=True, kw_only=True)
class _Right:
    """Cases on which the forward pass is right."""

    cases: list[Case]
    all_are: bool


@dataclass
class _Tally:
    """Of the forward cases."""

    usable: list[Case]
    right: list[Case]
    wrong: dict[str, list[tuple[Case, Problem]]]
    refused: list[tuple[Case, str]]
    unlike: list[Case]
    left: int = 0


def _forward(session: Session, cases: Sequence[Case]) -> _Right:
    """'forward', 'memory' and 'repeatable'."""
    tally = _Tally(usable=[], right=[], wrong={"forward": [], "memory": []}, refused=[], unlike=[])
    end = _end(session, FORWARD_SECONDS)
    for number, case in enumerate(cases):
        if time.perf_counter() > end:
            tally.left = len(cases) - number
            break
        session.starts("forward", case)
        try:
            outcome = forward_outcome(session.definition, case, session.device)
        except ReferenceFails as error:
            tally.refused.append((case, str(error)))
            continue
        tally.usable.append(case)
        if outcome.problem is not None:
            tally.wrong["memory" if outcome.problem.kind in OF_MEMORY else "forward"].append((case, outcome.problem))
            continue
        tally.right.append(case)
        if not outcome.repeatable:
            tally.unlike.append(case)
    if not tally.usable:
        case, said = tally.refused[0]
        text = case_text(session.definition, case)
        raise UsageError(f"the reference fails on every case, such as {text}: it {said}", limit="see inputs and sizes")
    _tell_forward(session, tally)
    return _Right(cases=tally.right, all_are=len(tally.right) == len(tally.usable))


def _end(session: Session, seconds: float) -> float:
    return time.perf_counter() + (seconds / 4 if session.quick else seconds)


def _tell_forward(session: Session, tally: _Tally) -> None:
    if tally.refused:
        case, said = tally.refused[0]
        text = case_text(session.definition, case)
        session.tell(note=f"{len(tally.refused)} cases were not checked, such as {text}: there the reference {said}")
    if tally.left:
        session.tell(note=f"the {tally.left} largest cases were not checked: the others took all the time there is")
    count = len(tally.usable)
    for name, passed in (("forward", "as the reference"), ("memory", "nothing outside is read or written")):
        wrong = tally.wrong[name]
        if wrong:
            tell_failure(session, name, wrong[0], forward_problem, cases=count, failed=len(wrong))
        else:
            session.found(name, "passed", passed, cases=count)
    if tally.unlike:
        at = case_text(session.definition, tally.unlike[0])
        text = f"not deterministic: two calls on the same inputs differ, such as {at}"
        session.found("repeatable", "noted", text, cases=count, failed=len(tally.unlike))
    else:
        session.found("repeatable", "passed", "two calls on the same inputs give the same bits", cases=count)


# NaN and infinity


def _nonfinite(session: Session, cases: Sequence[Case]) -> bool:
    """'non-finite': a result that hides a NaN hides a mistake made before it. Nothing wrong?"""
    if session.definition.nonfinite is False or not cases:
        reason = "nonfinite = False" if session.definition.nonfinite is False else "no input can be NaN or infinite"
        session.found("non-finite", "skipped", reason)
        return True
    done, wrong, refused = _each(session, "non-finite", cases, _nonfinite_problem, _end(session, NONFINITE_SECONDS))
    if done and not wrong:
        session.found("non-finite", "passed", "NaN and infinity are passed on as by the reference", cases=done)
    elif not done:
        reason = f"the reference {refused}" if refused else "there was no time left"
        session.found("non-finite", "skipped", reason)
    return not wrong


def _each(
    session: Session,
    name: str,
    cases: Sequence[Case],
    problem_of: Callable[[Definition, Case, str], Problem | None],
    end: float,
) -> tuple[int, int, str]:
    """(how many were checked until that time, how many of them are wrong, why the reference fails on the last one on
    which it does). A wrong one is told."""
    wrong: list[tuple[Case, Problem]] = []
    done, refused = 0, ""
    for case in cases:
        if time.perf_counter() > end:
            break
        session.starts(name, case)
        try:
            problem = problem_of(session.definition, case, session.device)
        except ReferenceFails as error:
            refused = str(error)
            continue
        done += 1
        if problem is not None:
            wrong.append((case, problem))
    if wrong:
        tell_failure(session, name, wrong[0], problem_of, cases=done, failed=len(wrong))
    return done, len(wrong), refused


def _nonfinite_problem(definition: Definition, case: Case, device: str) -> Problem | None:
    problem = forward_problem(definition, case, device)
    if problem is None:
        return None
    return Problem(kind=problem.kind, text=f"{problem.text}; if it need not pass them on, say so: nonfinite = False")


# gradient


def _gradient(session: Session, cases: Sequence[Case]) -> bool:
    """'gradient'; is there one?"""
    wanted = session.definition.gradient
    if wanted is False or session.definition.mutates:
        reason = "gradient = False" if wanted is False else "the kernel writes to its inputs"
        session.found("gradient", "skipped", reason)
        return False
    small = [case for case in cases if elements(session.definition, case.sizes) <= GRADIENT_ELEMENTS]
    chosen = small[:: max(1, len(small) // GRADIENT_CASES)]
    try:
        done, wrong, refused = _each(session, "gradient", chosen, gradient_problem, _end(session, GRADIENT_SECONDS))
    except NotSupported as error:
        _tell_not_supported(session, "gradient", wanted, f"no gradient: {error}")
        return False
    if done and not wrong:
        session.found("gradient", "passed", "as autograd's of the reference", cases=done)
    elif not done:
        reason = f"the reference has none: it {refused}" if refused else "no case is small enough"
        session.found("gradient", "skipped", reason)
    return bool(done)


def _tell_not_supported(session: Session, name: str, wanted: bool | None, text: str) -> None:
    """A mistake where the user's file says that it is supported."""
    if wanted:
        session.found(name, "failed", failed=1, failure=KernelFailure(what=text))
    else:
        session.found(name, "noted", text)


# torch.compile, autocast, the operator


def compile_backend(session: Session) -> str:
    """inductor needs a C++ compiler on the CPU, and some seconds a graph; aot_eager traces in the same way."""
    if session.quick:
        return "aot_eager"
    try:
        cpp_command()
    except MachineError:
        return "aot_eager"
    return "inductor"


def _compile(session: Session, cases: Sequence[Case]) -> bool:
    """'compile'; can it be a part of a graph?"""
    definition = session.definition
    if definition.compiles is False:
        session.found("compile", "skipped", "compiles = False")
        return False
    of_one = [case for case in cases if case.dtype == definition.dtypes[0]]
    chosen = [of_one[len(of_one) // 2], of_one[len(of_one) // 4], of_one[-1]] if len(of_one) > 3 else of_one
    backend = compile_backend(session)
    session.starts("compile", chosen[0], COMPILE_SECONDS)
    try:
        problem = compiled_problem(definition, chosen, session.device, backend)
    except NotSupported as error:
        _tell_not_supported(session, "compile", definition.compiles, f"not in torch.compile(fullgraph=True): {error}")
        return False
    except ReferenceFails as error:
        session.found("compile", "skipped", f"the reference {error}")
        return False
    if problem is not None:
        session.found("compile", "failed", failed=1, failure=session.failure(chosen[0], problem.text))
        return False
    session.found("compile", "passed", f"fullgraph=True with {backend}: as the reference", cases=len(chosen))
    return True


def _autocast(session: Session, cases: Sequence[Case]) -> None:
    in_fp32 = [case for case in cases if case.dtype == "float32"]
    if "float32" not in session.definition.dtypes or not in_fp32 or session.definition.mutates:
        session.found("autocast", "skipped", "it takes no fp32, or writes to its inputs")
        return
    first = in_fp32[len(in_fp32) // 2]
    session.starts("autocast", first)
    try:
        problem = autocast_problem(session.definition, first, session.device)
    except ReferenceFails as error:
        session.found("autocast", "skipped", f"the reference {error}")
        return
    if problem is None:
        session.found("autocast", "passed", "under bf16 autocast, right to bf16", cases=1)
        return
    tell_failure(session, "autocast", (first, problem), autocast_problem, cases=1, failed=1)


def _operator(session: Session, cases: Sequence[Case], *, has_gradient: bool, compiles: bool) -> None:
    """'operator': torch.library.opcheck, but for what the kernel does not support anyway."""
    case = cases[len(cases) // 2]
    left_out = {*(() if has_gradient else OF_GRADIENTS), *(() if compiles else OF_COMPILING)}
    tests = [one for one in OPERATOR_TESTS if one not in left_out]
    session.starts("operator", case, COMPILE_SECONDS)
    try:
        failures = operator_failures(session.definition, case, session.device, tests)
    except NotSupported as error:
        session.found("operator", "noted", str(error))
        return
    except Exception as error:  # the user's own code
        session.found("operator", "skipped", f"it raises {type(error).__name__}, see forward")
        return
    if failures:
        what = "; ".join(f"{test}: {said}" for test, said in failures.items())
        session.found("operator", "failed", cases=1, failed=len(failures), failure=session.failure(case, what))
    else:
        session.found("operator", "passed", f"torch.library.opcheck: {', '.join(tests)}", cases=1)


# speed


def _right_where_timed(session: Session, timed: Sequence[Case]) -> bool:
    """'timed sizes': they are larger than those of the cases, and a kernel may be wrong from some size on."""
    done, wrong = 0, []
    for case in timed:
        session.starts(TIMED, case, TIMING_SECONDS)
        try:
            problem = forward_problem(session.definition, case, session.device)
        except ReferenceFails as error:
            session.tell(note=f"not compared at {case_text(session.definition, case)}: there the reference {error}")
            continue
        except Exception:  # not enough memory, say: what times it will tell
            continue
        done += 1
        if problem is not None:
            wrong.append((case, problem))
    if wrong:
        tell_failure(session, TIMED, wrong[0], forward_problem, cases=done, failed=len(wrong))
    elif done:
        session.found(TIMED, "passed", "as the reference", cases=done)
    return not wrong


def _speed(session: Session) -> None:
    machine = detect()
    ceilings = load_ceilings(machine, device_name(torch.device(session.device)))
    cases = [timed_case(session.definition, dtype, quick=session.quick) for dtype in session.definition.dtypes]
    if not _right_where_timed(session, cases):
        session.tell(speed_reason=WRONG)
        return
    for case in cases:
        session.starts("timing", case, TIMING_SECONDS)
        try:
            speed = speed_of(
                session.definition,
                case,
                session.device,
                ceilings=ceilings,
                backend=compile_backend(session),
                quick=session.quick,
                fingerprint=machine.fingerprint,
            )
        except Exception as error:  # the user's own code, on sizes that were not checked
            at = case_text(session.definition, case)
            session.tell(note=f"not timed in {case.dtype}: at {at} it raises {error}"[:300])
            continue
        session.tell(speed=speed.to_json())
