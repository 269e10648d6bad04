"""The answers of all ranks to one command, as one answer: of the first rank, with what all of them have to say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from flatout.script.numerics import NumericsAnswer
from flatout.script.reference import CheckFound
from flatout.script.trial.answers import most_of


def as_one(answers: Sequence[Any]) -> Any:  # JSON
    """Times and what was observed are the first rank's; memory of a step is the largest, that of the machine the sum;
    a lever is rolled back where any rank did; numbers are those of all."""
    first = dict(answers[0])
    if first["event"] == "numerics":
        first |= numbers_of_all(answers)
    if "resident_bytes" in first:
        for resident in ("resident_bytes", "peak_resident_bytes"):
            first[resident] = sum(one[resident] for one in answers)
        first["rolled_back"] = list(chain.from_iterable(one["rolled_back"] for one in answers))
    if first["event"] == "peak":
        first["peak_bytes"] = most_of([one["peak_bytes"] for one in answers])
        first["incidents"] = list(chain.from_iterable(one["incidents"] for one in answers))
    return first


def numbers_of_all(answers: Sequence[NumericsAnswer]) -> NumericsAnswer:
    """The losses of all ranks in each step, every rank's tensors under names of their own. Norms of single gradients
    are the first rank's."""
    first = answers[0]
    steps = min(len(one["gradient_norms"]) for one in answers)
    return {
        **first,
        "losses": [list(chain.from_iterable(one["losses"][step] for one in answers)) for step in range(steps)],
        "gradient_norms": [_root_of_squares([one["gradient_norms"][step] for one in answers]) for step in range(steps)],
        "weight_digest": " ".join(one["weight_digest"] for one in answers),
        "buffer_digest": " ".join(one["buffer_digest"] for one in answers),
        "generator_digest": " ".join(one["generator_digest"] for one in answers),
        "finite": all(one["finite"] for one in answers),
        "checks": [_check(found) for found in _same_steps([one["checks"] for one in answers])],
        "in_codes": [_of_rank(rank, name) for rank, one in enumerate(answers) for name in one["in_codes"]],
        "compared": "samples" if any(one["compared"] == "samples" for one in answers) else "every element",
        "ended": any(one["ended"] for one in answers),
        "unseeded": list(dict.fromkeys(chain.from_iterable(one["unseeded"] for one in answers))),
    }


def _same_steps(checks: Sequence[Sequence[CheckFound]]) -> list[list[CheckFound]]:
    """Of each step that all ranks checked, what each found. A rank checks fewer where its state is large."""
    by_step = [{one["step"]: one for one in of_rank} for of_rank in checks]
    return [[of_rank[step] for of_rank in by_step] for step in by_step[0] if all(step in one for one in by_step)]


def _check(found: Sequence[CheckFound]) -> CheckFound:
    unlike = (_of_rank(rank, one["unlike"]) for rank, one in enumerate(found) if one["unlike"])
    return {
        "step": found[0]["step"],
        "same_generators": all(one["same_generators"] for one in found),
        "unlike": next(unlike, ""),
        "replaced": all(one["replaced"] for one in found),
        "drift": [(_of_rank(rank, row[0]), *row[1:]) for rank, one in enumerate(found) for row in one["drift"]],
        "gradients": [(_of_rank(rank, row[0]), *row[1:]) for rank, one in enumerate(found) for row in one["gradients"]],
        "updates": [(_of_rank(rank, row[0]), *row[1:]) for rank, one in enumerate(found) for row in one["updates"]],
    }


def _root_of_squares(norms: Sequence[float | None]) -> float | None:
    known = [norm for norm in norms if norm is not None]
    return sum(norm**2 for norm in known) ** 0.5 if len(known) == len(norms) else None


def _of_rank(rank: int, name: str) -> str:
    return f"rank {rank}: {name}" if rank else name
