"""README and docs/: commands and links exist, the code runs, the reference pages are what the code says, and the tables
what the results give."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from docs import results
from docs.generate import anchor, pages
from flatout.cli import main
from flatout.cli.command_line import split_target
from flatout.machine.detect import detect
from flatout.tuning import step_tuning

ROOT = Path(__file__).parents[1]
TUNE_SECONDS = 400
"""Of a tune in the documentation: more than on any busy machine it needs for a few comparisons."""
PAGES = [Path("README.md"), Path("CONTRIBUTING.md"), Path("CHANGELOG.md"), Path("SECURITY.md")]
PAGES += sorted(page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md"))
OURS = ("tests/", "examples/", "benchmarks/", "flatout/")
"""A path under these must exist; another, such as train.py, is the reader's."""


def commands(readme: str) -> list[str]:
    """The lines after '$ ' in console blocks, continued lines joined."""
    blocks = re.findall(r"^```console\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\$ (.*)$", "\n".join(blocks).replace("\\\n", " "), re.MULTILINE)


def complaint(command: str) -> str:
    """What is wrong with it; '' if nothing is."""
    words = shlex.split(command, comments=True)
    for word in words:
        path = word.partition("::")[0]
        if path.startswith(OURS) and not (ROOT / path).exists():
            return f"no {path}"
    program = Path(words[0]).name
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "".join(f"make has no {word}" for word in words[1:] if word not in targets)
    return _verb_complaint(words[1:]) if program == "flatout" else ""


def _verb_complaint(words: list[str]) -> str:
    group: Any = typer.main.get_command(main.application())
    if not words or words[0].startswith("-"):
        known = {option for param in group.params for option in param.opts} | {"--help"}
        return "".join(f"flatout has no {word}" for word in words if word not in known)
    name, *rest = words
    if name not in group.commands:
        return f"flatout has no verb {name}"
    command = group.commands[name]
    valued = [option for param in command.params if not getattr(param, "is_flag", True) for option in param.opts]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    if isinstance(command, main.RunCommand):
        valued = [option.name for option in main._run_options() if option.value]
        known |= {option.name for option in main._run_options()}
    takes_script = isinstance(command, main.ScriptCommand)
    options = split_target(rest, valued)[0] if takes_script else [word for word in rest if word.startswith("-")]
    names = [word.partition("=")[0] for word in options if word.startswith("-")]
    return "".join(f"flatout {name} has no {option}" for option in names if option not in known)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_exist(page: Path) -> None:
    wrong = {command: why for command in commands((ROOT / page).read_text()) if (why := complaint(command))}
    assert wrong == {}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    assert broken == []


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as GitHub and MkDocs make them."""
    return {anchor(title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = set(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))
    assert listed == {str(page.relative_to("docs")) for page in PAGES if page.parts[0] == "docs"}


@pytest.mark.parametrize("name", ["levers.md", "plan.md", "checks.md", "cli.md", "api.md"])
def test_reference_pages_are_generated(name: str) -> None:
    remedy = "python -m docs.generate"
    assert (ROOT / "docs" / "reference" / name).read_text() == _generated()[name], remedy


@functools.cache
def _generated() -> dict[str, str]:
    return pages()


@pytest.mark.parametrize("page", results.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert "<!-- table: " in text
    assert results.filled(text) == text, "python -m docs.generate"


def test_a_planted_figure_in_a_table_is_replaced() -> None:
    page = results.filled("before\n<!-- table: proof proof_epyc_2_cores.json -->\n<!-- end of table -->\nafter\n")
    assert "| 71 of 71 |" in page
    assert (page.partition("\n")[0], page.splitlines()[-1]) == ("before", "after")
    assert results.filled(page.replace("71 of 71", "72 of 72")) == page


@pytest.mark.parametrize(
    ("region", "complaint"),
    [
        ("<!-- table: proof proof_epyc_2_cores.json -->\n", "'<!-- end of table -->'"),
        ("<!-- table: coffee proof_epyc_2_cores.json -->\n<!-- end of table -->", "no table 'coffee'"),
        ("<!-- table: proof proof_of_nothing_*.json -->\n<!-- end of table -->", "no file .*proof_of_nothing"),
    ],
)
def test_a_region_that_cannot_be_filled_is_refused(region: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        results.filled(region)


def test_figures_of_tables() -> None:
    bounds = {"ratio": 0.9913, "low": 0.9877, "high": 1.0044}
    assert results.ratio(bounds) == "x0.99 (0.99–1.00)"
    assert results.ratio({"ratio": 10.01, "low": 9.13, "high": 10.89}) == "x10.0 (9.1–10.9)"
    assert results.ratio({"ratio": 2.0, "low": 0.0, "high": float("inf"), "pairs": 5}) == "x2.00 (5 pairs, no interval)"
    assert results._cost({"comparison": bounds, "plain": [0.001, 0.002, 0.003]}) == "2 ms: +0.9 % (−0.4–1.2)"
    assert [results.percent(share) for share in (0, 0.0028, 0.03, 0.0996, 0.74)] == [
        *("0 %", "0.28 %", "3.0 %", "10 %", "74 %")
    ]


def test_commands_are_found_in_console_blocks_only() -> None:
    readme = "$ no\n```console\n$ make demo\nits output\n$ flatout check \\\n  --json\n```\n```python\n$ no\n```\n"
    assert commands(readme) == ["make demo", "flatout check    --json"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("make demo test", ""),
        ("make coffee", "make has no coffee"),
        ("flatout --version", ""),
        ("flatout --verbose", "flatout has no --verbose"),
        (".venv/bin/flatout chek", "flatout has no verb chek"),
        ("python examples/absent.py", "no examples/absent.py"),
        ("python train.py", ""),
    ],
)
def test_a_planted_command_is_judged(command: str, expected: str) -> None:
    assert complaint(command) == expected


SLOW_PAGES = ("library", "memory", "whatif")
"""Whose Python takes several seconds."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.stem in SLOW_PAGES else [], id=str(page))
        for page in PAGES
        if "```python" in (ROOT / page).read_text() and "reference" not in page.parts
    ],
)
@pytest.mark.usefixtures("brief")
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [lever for lever in step_tuning.LEVERS if not lever.compiles]
    monkeypatch.setattr(step_tuning, "LEVERS", few)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "cache"))
    # measuring them takes seconds, and more on a busy machine
    monkeypatch.setattr("flatout.tuning.step_tuning.machine_with_ceilings", lambda progress: detect())
    monkeypatch.setattr("flatout.predicted_time.replayed.OPERATOR_SECONDS", 0.0)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}  # a later block goes on from those before
    for block in blocks:
        block = block.replace("seconds=60", f"seconds={TUNE_SECONDS}")
        exec(compile(block, str(page), "exec"), names)
