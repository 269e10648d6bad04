"""What the process that runs the user's code was asked, and how it tells what it finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Literal, TypedDict

from flatout.kernels.custom.cases import Case, case_text
from flatout.kernels.custom.definition import Definition
from flatout.kernels.custom.drawn_inputs import reproduction
from flatout.kernels.custom.kernel_calls import NothingToCompare, Problem
from flatout.kernels.custom.result import KernelFailure, KernelProperty
from flatout.kernels.custom.shrinking import shrunk

Mode = Literal["check", "narrow", "sanitize"]


class Asked(TypedDict):
    """What the parent wants; its only argument, as JSON."""

    target: str
    mode: Mode
    device: str
    seed: int
    cases: int
    quick: bool
    timing: bool
    call_seconds: float
    candidates: list[dict[str, object]]
    """Of 'narrow': the cases to run in order."""
    at: str
    """Of 'narrow': the check that crashed."""


@dataclass
class Session:
    """What all checks share."""

    definition: Definition
    asked: Asked
    messages: IO[str]
    interprets_triton: bool = False
    """Does Triton's interpreter run the kernel, in Python and on the CPU?"""

    @property
    def device(self) -> str:
        return self.asked["device"]

    @property
    def quick(self) -> bool:
        return self.asked["quick"]

    def tell(self, **message: object) -> None:
        tell(self.messages, **message)

    def starts(self, check: str, case: Case, seconds: float | None = None) -> None:
        """The next call may crash or hang: say which it is."""
        self.tell(
            at=check,
            case=case.to_json(),
            text=case_text(self.definition, case),
            reproduce=reproduction(self.definition, case, self.device),
            seconds=seconds or self.asked["call_seconds"],
        )

    def found(self, name: str, verdict: str, text: str = "", **more: Any) -> None:  # Any: fields of KernelProperty
        one = KernelProperty(name=name, verdict=verdict, text=text, **more)  # type: ignore[arg-type]
        self.tell(property=one.to_json())

    def failure(self, case: Case, what: str) -> KernelFailure:
        return KernelFailure(
            what=what,
            case=case_text(self.definition, case),
            reproduce=reproduction(self.definition, case, self.device),
        )


def tell(messages: IO[str], **message: object) -> None:
    messages.write(json.dumps(message) + "\n")
    messages.flush()


def tell_failure(
    session: Session,
    name: str,
    first: tuple[Case, Problem],
    look: Callable[[Definition, Case, str], Problem | None],
    *,
    cases: int,
    failed: int,
) -> None:
    """A property with the smallest case that fails in the same way as `first`."""
    case, problem = first

    def looked(simpler: Case) -> Problem | None:
        try:
            return look(session.definition, simpler, session.device)
        except NothingToCompare:
            return None

    def fails(simpler: Case) -> bool:
        session.starts(name, simpler)
        found = looked(simpler)
        return found is not None and found.kind == problem.kind

    small = shrunk(session.definition, case, fails)
    problem = looked(small) or problem
    session.found(name, "failed", cases=cases, failed=failed, failure=session.failure(small, problem.text))
