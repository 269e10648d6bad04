"""Our options end where the script begins, and nothing of the script's is touched."""

from __future__ import annotations

import pytest

from flatout.cli.command_line import Option, asks_for_help, parse_options, split_target
from flatout.errors import UsageError

OPTIONS = (Option(name="--plan", meaning="the plan", value="FILE"), Option(name="--quiet", meaning="say nothing"))


@pytest.mark.parametrize(
    ("line", "own", "target"),
    [
        ([], [], []),
        (["train.py"], [], ["train.py"]),
        (["--plan", "p.toml", "train.py", "--plan", "x"], ["--plan", "p.toml"], ["train.py", "--plan", "x"]),
        (["--plan=p", "train.py"], ["--plan=p"], ["train.py"]),
        (["train.py", "--help", "two words", "--", "-m", ""], [], ["train.py", "--help", "two words", "--", "-m", ""]),
        (["--quiet", "-m", "a.b", "--help"], ["--quiet"], ["-m", "a.b", "--help"]),
        (["-ma.b", "-q"], [], ["-m", "a.b", "-q"]),
        (["-m"], [], ["-m"]),
        (["--plan", "-m", "train.py"], ["--plan", "-m"], ["train.py"]),
        (["--quiet", "--", "--odd.py", "x"], ["--quiet"], ["--odd.py", "x"]),
        (["--quiet", "--plan"], ["--quiet", "--plan"], []),
        (["-", "x"], [], ["-", "x"]),
        ([""], [], [""]),
    ],
)
def test_split(line: list[str], own: list[str], target: list[str]) -> None:
    assert split_target(line, {"--plan"}) == (own, target)


def test_options_and_their_values() -> None:
    chosen = {"--plan": "b", "--quiet": ""}
    assert parse_options(["--plan", "a", "--quiet", "--plan=b", "t.py"], OPTIONS) == (chosen, ["t.py"])
    assert parse_options(["--plan", "--quiet", "t.py"], OPTIONS) == ({"--plan": "--quiet"}, ["t.py"])
    assert parse_options(["--plan=a=b", "t.py"], OPTIONS) == ({"--plan": "a=b"}, ["t.py"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--quit", "t.py"], "no option --quit; did you mean --quiet?"),
        (["-x"], "no option -x; see --help"),
        (["--quiet=yes", "t.py"], "--quiet has the value 'yes'; it is a switch and takes none"),
        (["--plan"], "--plan has no value; write --plan FILE"),
        (["--plan=", "t.py"], "--plan has no value; write --plan FILE"),
    ],
)
def test_a_slip_is_named(line: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(line, OPTIONS)
    assert str(caught.value) == message


def test_help_is_ours_only_before_the_script() -> None:
    assert asks_for_help(["--quiet", "--help"], OPTIONS)
    assert asks_for_help(["--quiet", "--help", "t.py"], OPTIONS)
    assert not asks_for_help(["t.py", "--help"], OPTIONS)
    assert not asks_for_help(["-m", "t", "--help"], OPTIONS)
    assert not asks_for_help(["--plan", "--help", "t.py"], OPTIONS)
