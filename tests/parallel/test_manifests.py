"""Manifests start the same command, whatever is in it; the script for Slurm is run with programs that stand in for
Slurm's."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.cli.launch import launch
from flatout.errors import UsageError
from flatout.parallel import manifests
from flatout.parallel.launch_request import Launch
from flatout.parallel.manifests import KINDS, manifest

FOUR = Launch(command=("python", "train.py"), nnodes=4, nproc_per_node=8, rendezvous=("here", 29_501))
ODD = [
    "train.py",
    "two words",
    "it's",
    'a "quote"',
    "two\nlines",
    "carriage\rreturn",
    "tab\t",
    "-x",
    "--",
    "",
    "$HOME $(MACHINE) `date` ${x}",
    "back\\slash \\n",
    "*?[a]",
    "größer 日本 🙂",
    "\x07\x1b\x7f\x85\u2028\ufeff",
    "yes",
    "null",
    "1e3",
    "# no comment",
    "key: value",
    "!tag &anchor *alias",
    "#SBATCH --nodes=99\n#SBATCH --nodes=98",
]
STANDS_IN = {
    "scontrol": 'test "$*" = "show hostnames gpu[1-4]" && printf "gpu1\\ngpu2\\n"',
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "flatout": f'exec {sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"',
}


def started_by_slurm(text: str, folder: Path) -> list[str]:
    """The arguments that flatout is given on machine 2."""
    for name, body in STANDS_IN.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    script = folder / "job.sh"
    script.write_bytes(text.encode())
    variables = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "gpu[1-4]",
        "SLURM_NODEID": "2",
    }
    subprocess.run(["bash", "-n", str(script)], check=True)
    done = subprocess.run(["bash", str(script)], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words: list[str] = json.loads(done.stdout)
    return words


def job_of(text: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def container_of(text: str) -> dict[str, Any]:
    job = job_of(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
    container: dict[str, Any] = job["template"]["spec"]["containers"][0]
    return container


def expanded(words: list[str]) -> list[str]:
    """As Kubernetes replaces references to variables, on machine 2."""
    found = []
    for word in words:
        parts = word.split("$$")
        found.append("$".join(part.replace("$(MACHINE)", "2") for part in parts))
    return found


def test_slurm_starts_the_command_on_each_machine(tmp_path: Path) -> None:
    text = manifest("slurm", FOUR, ODD)
    assert started_by_slurm(text, tmp_path) == [
        "launch", "--node-rank", "2", "--rendezvous", "gpu1:29501", "--nnodes", "4", "--nproc-per-node", "8", *ODD
    ]  # fmt: skip
    directives = [line for line in text.partition("set -euo")[0].splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "#SBATCH --job-name=flatout-train",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
    ]


def test_slurm_on_one_machine_needs_no_rendezvous(tmp_path: Path) -> None:
    text = manifest("slurm", Launch(command=("python",), nproc_per_node=2), ["-m", "package.train", "--lr", "1"])
    words = ["launch", "--nnodes", "1", "--nproc-per-node", "2", "-m", "package.train", "--lr", "1"]
    assert started_by_slurm(text, tmp_path) == words
    assert "#SBATCH --job-name=flatout-package" in text


def test_kubernetes_starts_the_command_on_each_machine() -> None:
    text = manifest("kubernetes", FOUR, ODD)
    container = container_of(text)
    name = "flatout-train"
    assert container["command"] == ["flatout"]
    assert expanded(container["args"]) == [
        "launch", "--nnodes", "4", "--nproc-per-node", "8",
        "--rendezvous", f"{name}-machine-0-0.{name}:29501", "--node-rank", "2", *ODD,
    ]  # fmt: skip
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    spec = job_of(text)["spec"]
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True}
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (4, 4, "Indexed")
    assert job["backoffLimit"] == 0
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 40
    assert "job-completion-index" in container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"]


def test_kubernetes_on_one_machine_needs_no_rendezvous() -> None:
    container = container_of(manifest("kubernetes", Launch(command=("python",)), ["train.py"]))
    assert container["args"] == ["launch", "--nnodes", "1", "--nproc-per-node", "1", "train.py"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_variable_is_written_down(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN_HERE", "hush-1")
    variables = (("API_TOKEN", "hush-2"), ("odd name\nx", "hush-3"))
    text = manifest(kind, Launch(command=("python",), variables=variables), ["train.py"])
    assert "hush" not in text
    assert "HIDDEN_HERE" not in text
    assert "# Set here, as on the command line: API_TOKEN" in text
    assert "odd name" not in text
    assert "Keep secrets" in text


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_the_request_are_passed_on_where_they_are_set(kind: Any, tmp_path: Path) -> None:
    request = Launch(
        command=("python",),
        nnodes=4,
        nproc_per_node=8,
        rendezvous=("here", 29_500),
        min_nnodes=2,
        max_restarts=3,
        hang_seconds=90.5,
        join_seconds=1_234_567.0,
        interface="-eth 0",
        plan=Path("a plan.toml"),
        quiet=True,
    )
    text = manifest(kind, request, ["train.py"])
    words = started_by_slurm(text, tmp_path) if kind == "slurm" else container_of(text)["args"]
    set_words = [
        "--min-nnodes=2", "--join-timeout=1234567s", "--max-restarts=3", "--hang-timeout=90.5s", "--interface=-eth 0",
        "--plan=a plan.toml", "--quiet",
    ]  # fmt: skip
    assert [word for word in words if word in set_words] == set_words
    assert not [word for word in words if word.startswith("--grace")]
    if kind == "slurm":
        assert "#SBATCH --no-kill" in text
        assert "srun --kill-on-bad-exit=0 --no-kill" in text
    else:
        assert job_of(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 12


def test_its_options_are_those_of_the_command() -> None:
    parameters = {name.replace("_", "-") for name in inspect.signature(launch).parameters}
    own = ["--nnodes", "--nproc-per-node", "--rendezvous", "--node-rank", "--quiet"]
    assert {option.removeprefix("--") for option in [*manifests._OPTIONS.values(), *own]} <= parameters


@pytest.mark.parametrize("script", ["日本.py", "-", f"{'x' * 200}.py", "a b;c$d.py", "../Some_Dir/My.Train.py"])
def test_names_are_dns_labels(script: str) -> None:
    name = job_of(manifest("kubernetes", FOUR, [script]))["metadata"]["name"]
    pod = f"{name}-machine-0-0"
    assert len(pod) <= 63
    assert pod.replace("-", "").isalnum()
    assert pod.isascii()
    assert pod == pod.lower()
    assert not name.endswith("-")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], r"script_command is \[\]; it is a list of words; for example \['train.py'\]"),
        ("train.py", "script_command is 'train.py'; it is a list of words"),
        (["train.py", "a\0b"], "is not text in UTF-8; a manifest is a text file"),
        (["train.py", "\udcff"], "is not text in UTF-8; a manifest is a text file"),
        (["train.py", 3], "an argument is 3; arguments are text"),
    ],
)
def test_what_cannot_be_written_is_refused(kind: Any, words: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        manifest(kind, FOUR, words)


def test_other_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match="the manifest is for 'pbs'; it is for one of slurm, kubernetes"):
        manifest("pbs", FOUR, ["train.py"])  # type: ignore[arg-type]
