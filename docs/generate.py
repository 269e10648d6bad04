"""The reference pages, made from the code, and the tables of results: `python -m docs.generate` writes them.

docs/reference/*.md are made here, and docs/results.py fills the tables of docs/benchmarks.md and README.md. A test
fails where a page is not what this makes.
"""

from __future__ import annotations

import importlib
import inspect
import os
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from docs import results
from flatout.diagnose.check import Check

REFERENCE = Path(__file__).parent / "reference"
HELP_COLUMNS = 100


def pages() -> dict[str, str]:
    """File name -> text."""
    return {
        "levers.md": levers_page(),
        "plan.md": plan_page(),
        "checks.md": checks_page(),
        "cli.md": cli_page(),
        "api.md": api_page(),
    }


# levers and plan


def levers_page() -> str:
    from flatout.plan_choices import declared

    lines = [
        "# Levers",
        "",
        "What `flatout tune` may change, and what `TrainStep`, `batches`, `predict` and `generate` carry out of a "
        "plan. Each is tried only where it applies, and kept only if it is faster and its numbers hold. What a script "
        "sets itself is never overridden.",
        "",
        "| lever | plan field | numbers | for |",
        "|--|--|--|--|",
    ]
    found = [(name, one, _class(path)) for name, one in declared().items() for path in one.levers]
    for name, one, lever in found:
        lines.append(f"| [{lever.name}](#{anchor(lever.name)}) | `{name}` | {lever.exactness} | {one.aim} |")
    for name, one, lever in found:
        where = ", ".join(f"`{_scopes()[scope]}`" for scope in one.scopes)
        lines += ["", f"## {lever.name}", "", f"`{name}`: {_values(name, lever)} · {lever.exactness} · {where}", ""]
        lines.append(_prose(lever))
    return "\n".join(lines) + "\n"


def plan_page() -> str:
    from flatout.plan_choices import declared

    lines = [
        "# The plan",
        "",
        "A plan is every choice of how to run. `flatout tune` writes one as `flatout.toml`; in code it is "
        "`flatout.Plan(...)`. Unset fields change nothing. A field that does not apply to a call is refused by name.",
    ]
    for name, one in declared().items():
        where = ", ".join(f"`{_scopes()[scope]}`" for scope in one.scopes)
        lines += ["", f"## {name}", "", f"{_values(name)}", "", f"{_sentence(one.meaning)}", ""]
        lines.append(f"Numbers: {one.exactness}. For: {one.aim}. Applies to {where}.")
        for requirement in one.requires:
            remedy = f" ({requirement.remedy})" if requirement.remedy else ""
            lines.append(f"Constrained by `{requirement.other}`: {requirement.why}{remedy}.")
        if one.replaces:
            lines.append(f"Makes {', '.join(f'`{other}`' for other in one.replaces)} redundant.")
    return "\n".join(lines) + "\n"


def checks_page() -> str:
    from flatout.diagnose.checks import CHECKS
    from flatout.diagnose.model_checks import CHECKS as MODEL_CHECKS

    lines = [
        "# Checks",
        "",
        "What `flatout profile` and `flatout run` look for, in the order in which findings are printed. Each "
        "finding has "
        "its evidence with lines of the script, its cost where it was measured, and what to do. A check says nothing "
        "without the evidence named here. Checks of the machine, which `flatout check` runs, are not in this list.",
        "",
        *_check_table(CHECKS),
        "",
        "`flatout check net.py:make` checks a model that was built but not run for:",
        "",
        *_check_table(MODEL_CHECKS),
    ]
    for one in (*CHECKS, *MODEL_CHECKS):
        lines += ["", f"## {one.name}", "", one.means, "", f"- Evidence: {_sentence(one.needs)}"]
        lines.append(f"- If it is a false alarm: {_sentence(one.if_wrong)}")
    return "\n".join(lines) + "\n"


def _check_table(checks: Sequence[Check]) -> list[str]:
    rows = [f"| [{one.name}](#{anchor(one.name)}) | {one.means} |" for one in checks]
    return ["| check | what it means |", "|--|--|", *rows]


def _scopes() -> dict[str, str]:
    from flatout.plan_choices import SCOPES

    return {str(scope): called for scope, called in SCOPES.items()}


def _class(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(f"flatout.levers.{module}"), name)


def _values(name: str, lever: Any = None) -> str:
    """The values of a choice, as a reader writes them; of a lever, those that it takes."""
    from flatout.plan_choices import Choices, declared

    hint = typing.get_type_hints(Choices)[name]
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if kinds == [bool]:
        return "`true` or `false`"
    if kinds == [int]:
        return f"a whole number from {declared()[name].low} to {declared()[name].high}"
    values = [value for kind in kinds for value in typing.get_args(kind) if lever is None or lever().takes(value)]
    return ", ".join(f'`"{value}"`' for value in values)


def _prose(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


def _sentence(text: str) -> str:
    word = text.partition(" ")[0]
    is_code = any(letter in word for letter in "._(=")
    first = text if is_code else text[:1].upper() + text[1:]
    return first + ("" if text.endswith(".") else ".")


def anchor(title: str) -> str:
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return "-".join(kept.split())


# commands


def cli_page() -> str:
    """The help of each command."""
    import typer

    from flatout.cli import main

    os.environ["COLUMNS"] = os.environ["TERMINAL_WIDTH"] = str(HELP_COLUMNS)
    group: Any = typer.main.get_command(main.application())
    lines = [
        "# Command line",
        "",
        "Every command except `run` takes `--json` (`launch` only with `--check`, `bench` not with `show`) and then "
        "prints one versioned JSON document and nothing else; `run` writes one with `--report`.",
    ]
    for name in sorted(group.commands):
        lines += ["", f"## flatout {name}", "", "```text", _help(group, name), "```"]
    return "\n".join(lines) + "\n"


def _help(group: Any, name: str) -> str:
    from typer.testing import CliRunner

    from flatout.cli import main

    shown = CliRunner().invoke(
        main.application(), [name, "--help"], prog_name="flatout", env={"COLUMNS": str(HELP_COLUMNS), "NO_COLOR": "1"}
    )
    return "\n".join(line.rstrip() for line in shown.output.strip().splitlines())


# library


def api_page() -> str:
    import flatout

    lines = [
        "# Library",
        "",
        "`import flatout` loads neither torch nor anything else; each name is loaded when it is first used.",
    ]
    names = {name: getattr(flatout, name) for name in flatout.__all__}
    names |= {f"kernels.{name}": getattr(flatout.kernels, name) for name in flatout.kernels.__all__}
    for name, value in sorted(names.items(), key=lambda one: one[0].lower()):
        if isinstance(value, str) or not callable(value):
            continue
        lines += ["", f"## {name}", "", "```python", _signature(name, value), "```", "", _prose(value)]
        lines += _members(value) if inspect.isclass(value) else []
    return "\n".join(lines) + "\n"


def _signature(name: str, value: Callable[..., Any]) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return f"flatout.{name}"
    parameters = [_parameter(one) for one in signature.parameters.values()]
    kinds = [one.kind for one in signature.parameters.values()]
    keyword_only = [kind is inspect.Parameter.KEYWORD_ONLY for kind in kinds]
    if True in keyword_only and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(keyword_only.index(True), "*")
    whole = f"flatout.{name}({', '.join(parameters)})"
    return (
        whole
        if len(whole) <= HELP_COLUMNS
        else "\n".join([f"flatout.{name}(", *(f"    {one}," for one in parameters), ")"])
    )


def _parameter(one: inspect.Parameter) -> str:
    text = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "") + one.name
    if one.annotation is not one.empty:
        text += f": {one.annotation}"
    return text if one.default is one.empty else f"{text} = {one.default!r}"


def _members(kind: type) -> list[str]:
    """Public methods and properties with their first paragraph, those of Flatout's own base classes too."""
    lines = []
    own = [one for one in reversed(kind.__mro__) if one.__module__.startswith("flatout.")]
    for name, member in {name: member for one in own for name, member in vars(one).items()}.items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        called = f"`.{name}`" if isinstance(member, property) else f"`.{name}(...)`"
        lines.append(f"- {called}: {' '.join(inspect.cleandoc(function.__doc__).split(chr(10) + chr(10))[0].split())}")
    known = {one.name for one in fields(kind)} if hasattr(kind, "__dataclass_fields__") else set()
    return ["", *lines] if lines and len(known) < 40 else []


def main() -> None:
    REFERENCE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)
    for page in results.PAGES:
        page.write_text(results.filled(page.read_text()))


if __name__ == "__main__":
    main()
