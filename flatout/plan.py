"""The Plan: every choice of how to run, each with its reason.

A field that is None is left as the script has it, so an empty plan changes nothing. A plan names choices
and never asks whether this machine can carry them out: that is each lever's business. It is a value: frozen,
compared by content, written as TOML that a person can read and edit, and read back with every slip named.

>>> plan = Plan(precision="bf16").with_choice("compile", "regional", "the blocks repeat 12 times")
>>> plan.choices()
{'precision': 'bf16', 'compile': 'regional'}
>>> Plan.from_toml(plan.to_toml()) == plan
True
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from flatout import __version__
from flatout.errors import PlanError, UsageError
from flatout.notebook_tables import table_html
from flatout.plan_choices import (
    SAME_BATCH,
    SAME_PLAN,
    SCOPES,
    Choices,
    ChoiceValue,
    Exactness,
    Scope,
    choice_names,
    contradiction,
    declared,
)
from flatout.plan_document import RENAMED, SCHEMA, line, nearest, one_of, parse, short
from flatout.private_details import LEFT_OUT, arguments_digest, without_home
from flatout.whole_files import written_whole

Keywords: TypeAlias = dict[str, Any]  # of `Plan`, which checks them: each field has a type of its own


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Choices):
    """How to run a script, a training step or a model: choices, each with its reason, and where they are from.

    Raises PlanError for a choice that is unknown, malformed, or contradicts another.
    """

    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Choice -> why it was made; only for choices that are set."""
    script: str | None = None
    """What was tuned: a path as the user gave it, or '-m package.module'."""
    argv: tuple[str, ...] = ()
    """The script's own arguments, without its name. write_plan leaves them out, unless it is told to include them."""
    arguments_digest: str | None = None
    """Of these arguments; tells whether a run has the same ones. Given by `argv`, if not here."""
    sources: tuple[str, ...] = ()
    """The script's own files as they were tuned, each as 'sha256:... name'; empty: not known. `flatout diff` patches no
    others."""
    loop: str | None = None
    """What trained then, in words: models, optimizers, device. With other arguments another loop may train."""
    machine_fingerprint: str | None = None
    """The machine on which the plan was measured; elsewhere it must be verified again."""
    machine_name: str | None = None
    """That machine in words."""
    torch_version: str | None = None
    """torch.__version__ of that measurement."""
    flatout_version: str | None = __version__
    """The Flatout that made the plan; None if a file does not say."""
    exactness: Exactness | None = None
    """What the choices together do to the numbers, as proved; None if nothing was proved."""
    proved_reduced: tuple[str, ...] = ()
    """Choices whose kind changes rounding only, as a rule, and which changed the numbers of this script by more."""
    speedup: float | None = None
    """Measured: time of a plain step over time of a step under the plan; None if not measured."""
    flops_per_step: float | None = None
    """Floating-point operations of one training step; None if not counted."""
    warnings: tuple[str, ...] = ()
    """What the one who made the plan could not vouch for."""

    def __post_init__(self) -> None:
        for name, value in self.choices().items():
            _check_choice(name, value)
        object.__setattr__(self, "reasons", dict(self.reasons) if isinstance(self.reasons, Mapping) else self.reasons)
        if (found := contradiction(self.choices())) is not None:
            what, limit, remedy = found
            raise PlanError(what, limit=limit, remedy=remedy)
        _check_reasons(self)
        _check_provenance(self)
        if self.argv or (self.script is not None and self.arguments_digest is None):
            digest = arguments_digest(self.argv)
            if self.arguments_digest not in (None, digest):
                limit = f"argv has {digest}"
                raise PlanError(f"arguments_digest is {short(self.arguments_digest)}", limit=limit, remedy="remove it")
            object.__setattr__(self, "arguments_digest", digest)

    def choices(self) -> Keywords:
        """The choices that are set, in the order of declaration."""
        return {name: value for name in choice_names() if (value := getattr(self, name)) is not None}

    def __repr__(self) -> str:
        """Without what is as it is in any plan."""
        told = []
        for one in fields(self):
            value = getattr(self, one.name)
            usual = one.default if one.default_factory is MISSING else one.default_factory()
            if value != usual:
                told.append(f"{one.name}={value!r}")
        return f"Plan({', '.join(told)})"

    def _repr_html_(self) -> str:
        """In a notebook: each choice with its reason."""
        title = "Plan" if self.speedup is None else f"Plan: {self.speedup:.2f} times as fast"
        rows = [(name, str(value), self.reasons.get(name, "")) for name, value in self.choices().items()]
        return table_html(title, rows or [("", "no choice is set: it changes nothing")])

    def with_choice(self, name: str, value: ChoiceValue, reason: str) -> Plan:
        """The same plan with one choice set (or replaced), and why."""
        _check_name(name)
        if value is None:
            raise PlanError(f"{name} is None", limit="a choice has a value", remedy=f"use without({name!r})")
        changed: Keywords = {name: value, "reasons": {**self.reasons, name: reason}}
        return replace(self, **changed)

    def without(self, *names: str) -> Plan:
        """The same plan with these choices left to the script again. Give choices that need each other together."""
        for name in names:
            _check_name(name)
        unset: Keywords = dict.fromkeys(names)
        return replace(self, **unset, reasons={name: why for name, why in self.reasons.items() if name not in names})

    def part_for(self, scope: Scope) -> Plan:
        """The same plan with the choices alone that apply to a 'script', a training 'step', 'batches', 'predict' or
        'generate'."""
        if scope not in tuple(SCOPES):  # whatever it is, a list too
            raise PlanError(f"scope is {short(scope)}", limit=f"it is {one_of(SCOPES)}")
        return self.without(*(name for name in self.choices() if scope not in declared()[name].scopes))

    def check_for(self, scope: Scope) -> None:
        """PlanError for a choice that does not apply there, nor where the same plan is given."""
        same = next((group for group in SAME_PLAN if scope in group), (scope,))
        for name, value in self.choices().items():
            scopes = declared()[name].scopes
            if not set(scopes) & set(same):
                others = " and ".join(SCOPES[one] for one in scopes)
                remedy = f"use plan.part_for({scope!r})" if scope != "script" else f"remove {name}"
                if (scope, name) == ("script", "parallel"):
                    remedy = "a script whose TrainStep is made with it starts with: flatout launch SCRIPT"
                raise PlanError(
                    f"the plan's {name} is {short(value)}",
                    limit=f"{SCOPES[scope]} does not apply it ({others} would)",
                    remedy=remedy,
                )

    def mismatch(self, machine_fingerprint: str | None, torch_version: str | None) -> str | None:
        """Why the plan must be verified again here; None if it was measured on this machine with this torch."""
        if self.machine_fingerprint is None:
            return "the plan does not say on which machine it was measured"
        if self.machine_fingerprint != machine_fingerprint:
            return f"the plan was measured on another machine ({self.machine_name or self.machine_fingerprint})"
        if self.torch_version != torch_version:
            return f"the plan was measured with torch {self.torch_version or '(unknown)'}; here is {torch_version}"
        return None

    def without_private(self) -> Plan:
        """The same plan without the script's arguments, whose digest stays, and with '~' for the home directory."""
        script = None if self.script is None else without_home(self.script)
        reasons = {name: without_home(reason) for name, reason in self.reasons.items()}
        warnings = tuple(without_home(text) for text in self.warnings)
        return replace(self, argv=(), script=script, reasons=reasons, warnings=warnings)

    def to_toml(self) -> str:
        """The plan as a document for people, which from_toml reads back."""
        parts = [_header(self), f"schema = {SCHEMA}\n", "[plan]"]
        for name, value in self.choices().items():
            parts += [f"# {declared()[name].meaning}", line(name, value)]
        parts += ["", "[reasons]", *(line(name, self.reasons[name]) for name in self.choices() if name in self.reasons)]
        parts += ["", "[provenance]"]
        provenance = {name: getattr(self, name) for name in PROVENANCE}
        parts += [line(name, value) for name, value in provenance.items() if value is not None and value != ()]
        return "\n".join(parts) + "\n"

    @classmethod
    def from_toml(cls, text: str, source: str = "flatout.toml") -> Plan:
        """Read what to_toml or a person wrote; every error begins with `source`."""
        try:
            return cls(**_keywords(parse(text, _home)))
        except PlanError as error:
            raise PlanError(f"{source}: {error.what}", limit=error.limit, remedy=error.remedy) from None


PROVENANCE = tuple(one.name for one in fields(Plan) if "declared" not in one.metadata and one.name != "reasons")
"""The keys of [provenance]: everything that is neither a choice nor a reason."""

_LISTS = ("argv", "sources", "warnings", "proved_reduced")
_TEXTS = (
    "script",
    "arguments_digest",
    "loop",
    "machine_fingerprint",
    "machine_name",
    "torch_version",
    "flatout_version",
)


def shares_of_batch(plan: Plan, ranks: int) -> int:
    """Into how many shares so many ranks divide each batch: one each, unless several compute with the same samples.

    Ranks that follow one another have the same share. Raises PlanError where tensor_ranks does not divide the ranks.
    """
    if plan.parallel in SAME_BATCH or ranks == 1:
        return 1
    together = plan.tensor_ranks or 1
    if ranks % together:
        raise PlanError(
            f"tensor_ranks is {together}, and there are {ranks} ranks",
            limit="it must divide their number: so many share each layer",
            remedy="change one of the two, or drop tensor_ranks",
        )
    return ranks // together


_MAKE_ONE = "make one with: flatout tune SCRIPT, or for inference: flatout tune-inference MODEL INPUTS"


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in this file."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"no plan at {path}", remedy=_MAKE_ONE) from None
    except OSError as error:
        remedy = "name a file that you may read"
        raise UsageError(f"cannot read the plan {path}: {error.strerror}", remedy=remedy) from error
    except UnicodeDecodeError as error:
        what = f"{path}: byte {error.start} is 0x{error.object[error.start]:02x}"
        raise PlanError(what, limit="a plan is UTF-8 text", remedy="save it as UTF-8") from error
    if not text.strip():  # as a full disk leaves a file that is copied
        raise PlanError(f"the plan {path} is empty", limit="one without choices has a line [plan]", remedy=_MAKE_ONE)
    return Plan.from_toml(text, str(path))


def write_plan(path: str | os.PathLike[str], plan: Plan, *, include_private: bool = False) -> None:
    """Put the plan at this path whole or not at all: a crash or a full disk leaves what was there before.

    include_private: with the script's arguments, and paths in full.
    """
    text = (plan if include_private else plan.without_private()).to_toml()
    try:
        with written_whole(Path(os.path.realpath(path))) as temporary:  # a link stays a link
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        remedy = (
            "free some space or name another place" if error.errno == errno.ENOSPC else "name a place you may write"
        )
        raise UsageError(f"cannot write the plan {path}: {error.strerror}", remedy=remedy) from error


@functools.cache
def _kinds() -> dict[str, type | tuple[str, ...]]:
    """Choice -> bool, int or the words allowed, read from the annotations: they are written once."""
    hints = get_type_hints(Plan)
    kinds: dict[str, type | tuple[str, ...]] = {}
    for name in choice_names():
        kind = next(part for part in get_args(hints[name]) if part is not type(None))
        kinds[name] = get_args(kind) if get_origin(kind) is Literal else kind
    return kinds


def _check_choice(name: str, value: object) -> None:
    kind, low, high = _kinds()[name], declared()[name].low, declared()[name].high
    if isinstance(kind, tuple):
        if not isinstance(value, str) or value not in kind:
            what = f"{name} is {short(value)}"
            raise PlanError(what, limit=f"it must be {one_of(kind)}", remedy=nearest(value, kind))
    elif kind is bool:
        if not isinstance(value, bool):
            raise PlanError(f"{name} is {short(value)}", limit="it must be true or false")
    elif isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise PlanError(f"{name} is {short(value)}", limit=f"it must be a whole number from {low} to {high}")


def _check_reasons(plan: Plan) -> None:
    if not isinstance(plan.reasons, Mapping):
        raise PlanError(f"reasons is {short(plan.reasons)}", limit="it must map choices to texts")
    for name, reason in plan.reasons.items():
        _check_name(name)
        if not isinstance(reason, str):
            raise PlanError(f"the reason for {name} is {short(reason)}", limit="it must be a text")
        if getattr(plan, name) is None:
            remedy = f"set {name} or drop its reason"
            raise PlanError(f"there is a reason for {name}, which is not set", remedy=remedy)


def _check_provenance(plan: Plan) -> None:
    for name in _TEXTS:
        if not isinstance(value := getattr(plan, name), str | None):
            raise PlanError(f"{name} is {short(value)}", limit="it must be a text")
    for name in _LISTS:
        value = getattr(plan, name)
        if not isinstance(value, tuple) or not all(isinstance(part, str) for part in value):
            raise PlanError(f"{name} is {short(value)}", limit="it must be a sequence of texts")
    for name in ("speedup", "flops_per_step"):
        if (value := getattr(plan, name)) is not None:
            object.__setattr__(plan, name, _positive(name, value))
    words = get_args(Exactness)
    if plan.exactness is not None and plan.exactness not in words:
        what = f"exactness is {short(plan.exactness)}"
        raise PlanError(what, limit=f"it must be {one_of(words)}", remedy=nearest(plan.exactness, words))


def _check_name(name: object) -> None:
    if name not in choice_names():
        raise _unknown(name)


def _unknown(name: object) -> PlanError:
    what = f"a plan has no choice {short(name)}"
    if isinstance(name, str) and name in RENAMED:
        limit = "it splits a batch, where accumulation elsewhere often multiplies it"
        return PlanError(what, limit=limit, remedy=f"its name is {RENAMED[name]!r}")
    limit = f"there are {', '.join(choice_names())}"
    return PlanError(what, limit=limit, remedy=nearest(name, choice_names()))


def _positive(name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an int past the range of float
            if 0 < float(value) < math.inf:
                return float(value)
    raise PlanError(f"{name} is {short(value)}", limit="it must be a finite number above 0")


def _keywords(document: dict[str, dict[str, object]]) -> Keywords:
    """The tables as arguments of Plan, which checks them."""
    for table, known in (("plan", choice_names()), ("reasons", choice_names()), ("provenance", PROVENANCE)):
        for name in document.get(table, {}):
            if name not in known:
                limit = f"since schema 2 it is {RENAMED[name]!r}" if name in RENAMED else ""
                remedy = "rename it, or write schema = 1 if the file is that old" if limit else ""
                remedy = remedy or _home(name) or nearest(name, known)
                raise PlanError(f"unknown key {name!r} in [{table}]", limit=limit, remedy=remedy)
    lists = {
        name: tuple(value)
        for name, value in document.get("provenance", {}).items()
        if name in _LISTS and isinstance(value, list)
    }
    provenance = {"flatout_version": None, **document.get("provenance", {}), **lists}
    return {**document.get("plan", {}), "reasons": document.get("reasons", {}), **provenance}


def _header(plan: Plan) -> str:
    if plan.script is None:
        return (
            "# How to run flat out on this machine.\n"
            "# Each line of [plan] is one choice; without the line that choice is left as it is.\n"
        )
    script = plan.script or "SCRIPT"
    target = ["-m", script.removeprefix("-m ")] if script.startswith("-m ") else [script]
    called = shlex.join(["flatout", "run", *target, *plan.argv])
    if script.startswith("~/"):  # a shell expands it outside quotes only
        called = called.replace(shlex.quote(script), f"~/{shlex.quote(script[2:])}", 1)
    if not plan.argv and plan.arguments_digest != arguments_digest(()):
        called += f" {LEFT_OUT}"
    if not called.isprintable():  # a comment ends at the line's end
        called = "flatout run SCRIPT"
    return (
        "# How to run this script flat out on this machine, as flatout tune measured it.\n"
        "# Each line of [plan] is one choice; without the line that choice is as the script has it.\n"
        f"# next: {called}\n"
    )


def _home(name: str) -> str:
    """Where a key belongs that stands in the wrong table."""
    table = "plan" if name in choice_names() else "provenance" if name in PROVENANCE else ""
    return f"{name} belongs in [{table}]" if table else ""


def _allowed(name: str) -> str:
    """The values of a choice, in words."""
    kind, limits = _kinds()[name], declared()[name]
    if isinstance(kind, tuple):
        return one_of(kind)
    return "True or False" if kind is bool else f"a whole number from {limits.low} to {limits.high}"


def _document(plan: type[Plan]) -> None:
    """Give `help(Plan)` every choice with its meaning, and a wrong argument an error that names the right one."""
    choices = "\n\n".join(
        f"{name}: {_allowed(name)}\n    {one.meaning}\n"
        f"    {one.exactness}; for {', '.join(SCOPES[scope] for scope in one.scopes)}"
        for name, one in declared().items()
    )
    plan.__doc__ = f"{inspect.cleandoc(plan.__doc__ or '')}\n\nA choice that is None is left as it is:\n\n{choices}"
    known, initialise = {one.name for one in fields(plan)}, plan.__init__

    @functools.wraps(initialise)
    def checked(self: Plan, *values: object, **named: Any) -> None:  # Any: Plan checks them
        if values:
            remedy = "write Plan(precision='bf16'), or read a file with flatout.plan.read_plan(path)"
            raise PlanError(f"Plan got {short(values[0])}", limit="choices are given by name", remedy=remedy)
        for name in named:
            if name not in known:
                raise _unknown(name)
        initialise(self, **named)

    plan.__init__ = checked  # type: ignore[method-assign]


_document(Plan)
