"""What a shell completes, and the commands that the help shows."""

from __future__ import annotations

import shlex

import pytest

from flatout.cli.main import EXAMPLES, VERBS, main
from tests.test_docs import complaint


@pytest.mark.parametrize(
    ("line", "word", "found"),
    [
        ("flatout me", 1, ["memory"]),
        ("flatout run --no", 2, ["--no-plan", "--no-report"]),
        ("flatout tune --isolation g", 3, ["guard"]),
    ],
)
def test_a_shell_completes(
    line: str, word: int, found: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_FLATOUT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(word))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert not ended.value.code
    assert capsys.readouterr().out.split() == found


def test_the_completion_of_a_shell_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # then it is named
    with pytest.raises(SystemExit) as ended:
        main(["--show-completion", "bash"])
    assert not ended.value.code
    assert "complete -o default -F _flatout_completion flatout" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_commands_that_are_right(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out.partition("\nExamples:\n")[2]
    for command in EXAMPLES[verb].split("\n"):
        assert f"  {command}\n" in shown
        words = shlex.split(command)
        assert words[words.index("flatout") + 1] == verb
        assert complaint(shlex.join(words[words.index("flatout") :])) == ""
