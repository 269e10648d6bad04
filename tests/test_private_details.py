"""What is saved to be shared says neither with which arguments a script ran nor whose it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatout import private_details
from flatout.application.applied_plan import same_script
from flatout.errors import PlanError
from flatout.plan import Plan, read_plan, write_plan
from flatout.private_details import arguments_digest, with_home, without_home, without_private
from flatout.script.entry import Target

ARGUMENTS = ("--api-key", "s3cret", "two words")


@pytest.fixture(autouse=True)
def alice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(private_details.getpass, "getuser", lambda: "alice")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/alice/x/train.py:12", "~/x/train.py:12"),
        ("cannot read '/home/alice'", "cannot read '~'"),
        ("/home/alice2/train.py and /home/alice-old", "/home/alice2/train.py and /home/alice-old"),
        ("/scratch/alice/data and /data/alice.txt", "/scratch/USER/data and /data/alice.txt"),
        ("alice in the text", "alice in the text"),
    ],
)
def test_paths_do_not_say_whose_they_are(text: str, left: str) -> None:
    assert without_home(text) == left


@pytest.mark.parametrize("home", ["/", "", "relative"])
def test_no_home_directory_leaves_paths_alone(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(private_details.getpass, "getuser", lambda: "root")
    assert without_home("/root/train.py /") == "/root/train.py /"


def test_a_linked_home_directory_is_found_by_both_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("HOME", str(tmp_path / "link"))
    assert without_home(f"{tmp_path}/link/a {tmp_path}/real/b") == "~/a ~/b"


def test_a_user_who_is_not_in_the_password_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(private_details.getpass, "getuser", nobody)
    assert without_home("/home/alice/x /scratch/alice/x") == "~/x /scratch/alice/x"


def test_a_document_has_a_digest_in_place_of_arguments() -> None:
    command = "train.py --api-key s3cret 'two words'"
    document = {
        "script": {"name": "train.py", "arguments": list(ARGUMENTS), "status": 0},
        "findings": [{"remedy": f"flatout tune {command}", "where": "/home/alice/x/train.py:3"}],
        "steps": 3,
        "samples": (1.5, None),
    }
    kept = without_private(document)
    assert "s3cret" not in json.dumps(kept)
    digest = arguments_digest(ARGUMENTS)
    assert kept["script"] == {"name": "train.py", "arguments": None, "arguments_digest": digest, "status": 0}
    assert kept["findings"] == [{"remedy": "flatout tune train.py ARGUMENTS", "where": "~/x/train.py:3"}]
    assert (kept["steps"], kept["samples"]) == (3, [1.5, None])


def test_a_module_and_a_script_without_arguments() -> None:
    document = {"script": {"name": "-m pkg.job", "arguments": ["--key", "s3cret"]}, "next": "-m pkg.job --key s3cret"}
    assert without_private(document)["next"] == "-m pkg.job ARGUMENTS"
    bare = {"script": {"name": "/home/alice/a.py", "arguments": []}}
    assert without_private(bare) == {"script": {"name": "~/a.py", "arguments": []}}


def test_digests_tell_arguments_apart() -> None:
    lists = [(), ("a",), ("a", "b"), ("a b",), ("a,b",), ("\udcff",)]
    assert len({arguments_digest(one) for one in lists}) == len(lists)


def test_a_plan_is_written_without_arguments_and_is_for_thesame_script(tmp_path: Path) -> None:
    plan = Plan(
        threads=2,
        script="/home/alice/train.py",
        argv=ARGUMENTS,
        reasons={"threads": "as in /home/alice/x"},
        warnings=("/home/alice/data is slow",),
    )
    path = tmp_path / "flatout.toml"
    write_plan(path, plan)
    text = path.read_text()
    assert "s3cret" not in text and "alice" not in text  # noqa: PT018
    assert (
        "# next: flatout run '~/train.py' ARGUMENTS\n" in text or "# next: flatout run ~/train.py ARGUMENTS\n" in text
    )
    back = read_plan(path)
    assert back.argv == ()
    assert back.arguments_digest == plan.arguments_digest == arguments_digest(ARGUMENTS)
    assert same_script(str(back.script), Target(path="/home/alice/train.py"))
    write_plan(path, plan, include_private=True)
    assert read_plan(path) == plan


def test_a_plan_without_arguments_says_so() -> None:
    assert Plan(script="train.py").arguments_digest == arguments_digest(())
    assert Plan().arguments_digest is None
    assert "ARGUMENTS" not in Plan(script="train.py").to_toml()


def test_a_digest_that_is_not_that_of_the_arguments_is_refused() -> None:
    with pytest.raises(PlanError, match="arguments_digest is 'sha256:00'; argv has sha256:"):
        Plan(script="train.py", argv=("a",), arguments_digest="sha256:00")


def test_only_the_home_directory_is_expanded() -> None:
    assert with_home("~/a.py") == "/home/alice/a.py"
    assert with_home("~other/a.py") == "~other/a.py"
    assert with_home("a~/b.py") == "a~/b.py"
