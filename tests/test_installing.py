"""What `make demo` and `make test` do first, with pip and Python replaced: nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCH = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
FAKE_PYTHON = f"""#!/bin/sh
# A Python that makes environments of itself, and writes down what pip is told.
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; [ -z "$FAIL_VENV" ] ;;
  *"pip "*" index versions torch"*) echo "$OFFERS" ;;
  *"pip "*" install "*) echo "$*" >> "$PIP_LOG"; case "$*" in *"$FAIL_PIP"*) [ -z "$FAIL_PIP" ];; esac ;;
  *"m.version('torch')"*) [ -n "$HAS_TORCH" ] ;;
  "-m pip"*|"--version") echo fake ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder / "checkout", folder / "pip.log"
        (self.folder / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "install", self.folder / "scripts")
        shutil.copy(ROOT / "constraints.txt", self.folder)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("python3.13", "nvidia-smi"):
            self.program(name, FAKE_PYTHON if name.startswith("python") else "#!/bin/sh\nexit 9\n")

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def install(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        none = dict.fromkeys(("FAIL_VENV", "FAIL_PIP", "OFFERS", "HAS_TORCH", "TORCH_INDEX", "PYTHON"), "")
        path = f"{self.bin}:/usr/bin:/bin"
        environment = {**os.environ, **none, "PATH": path, "PIP_LOG": str(self.log), **variables}
        command = [str(self.folder / "scripts" / "install"), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    @property
    def asked(self) -> list[str]:
        return [line.partition(" install ")[2] for line in self.log.read_text().splitlines()]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def on_linux_x86() -> bool:
    return os.uname().sysname == "Linux" and os.uname().machine == "x86_64"


@pytest.mark.skipif(not on_linux_x86(), reason="the choice of a build is that of Linux on x86-64")
@pytest.mark.parametrize(
    ("offers", "gpu", "index"),
    [
        ("2.13.0", "", "https://download.pytorch.org/whl/cpu"),
        ("2.13.0+cpu, 2.13.0", "", None),
        ("2.13.0", "GPU 0: NVIDIA X", None),
    ],
)
def test_which_torch_is_taken_and_what_is_said_first(
    checkout: Checkout, offers: str, gpu: str, index: str | None
) -> None:
    checkout.program("nvidia-smi", f"#!/bin/sh\necho '{gpu}'\n")
    done = checkout.install(OFFERS=offers)
    assert done.returncode == 0, done.stderr
    torch, rest = checkout.asked
    assert torch == f"-c constraints.txt {f'--index-url {index} ' if index else ''}{TORCH}"
    assert rest.endswith("-e .[dev]")
    assert f"downloading {TORCH}" in done.stdout
    assert "MB" in done.stdout
    assert (checkout.folder / ".venv" / "installed").exists()


def test_the_index_may_be_named(checkout: Checkout) -> None:
    assert checkout.install(TORCH_INDEX="https://a.mirror/whl").returncode == 0
    assert checkout.asked[0] == f"-c constraints.txt --index-url https://a.mirror/whl {TORCH}"
    assert checkout.install(TORCH_INDEX="https://a.mirror/whl", FAIL_PIP="a.mirror").returncode == 1


@pytest.mark.skipif(not on_linux_x86(), reason="the choice of a build is that of Linux on x86-64")
def test_an_index_that_cannot_be_reached_is_not_the_end(checkout: Checkout) -> None:
    done = checkout.install(FAIL_PIP="download.pytorch.org")
    assert done.returncode == 0, done.stderr
    assert "cannot be used" in done.stdout
    assert checkout.asked[1] == f"-c constraints.txt {TORCH}"


def test_a_second_call_installs_no_second_torch(checkout: Checkout) -> None:
    checkout.install()
    checkout.log.unlink()
    done = checkout.install(HAS_TORCH="1")
    assert "is installed already" in done.stdout
    assert len(checkout.asked) == 1
    assert "making" not in done.stdout


@pytest.mark.parametrize("broken", ["empty", "no pip", "dangling"])
def test_a_broken_environment_is_made_anew(checkout: Checkout, broken: str) -> None:
    bin_folder = checkout.folder / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    if broken == "no pip":
        checkout.program("half", '#!/bin/sh\n[ "$2" != pip ]\n')
        shutil.copy(checkout.bin / "half", bin_folder / "python")
    elif broken == "dangling":
        (bin_folder / "python").symlink_to("/absent/python")
    done = checkout.install()
    assert done.returncode == 0, done.stderr
    assert "is broken: it is created again" in done.stdout
    assert (checkout.folder / ".venv" / "installed").exists()


def test_one_that_cannot_be_made_leaves_nothing_behind(checkout: Checkout) -> None:
    done = checkout.install(FAIL_VENV="1")
    assert done.returncode == 1
    assert "cannot make a virtual environment" in done.stderr
    assert not (checkout.folder / ".venv").exists()
    assert checkout.install().returncode == 0


def test_an_interrupted_download_can_be_gone_on_with(checkout: Checkout) -> None:
    done = checkout.install(FAIL_PIP="[dev]")
    assert done.returncode == 1
    assert "call make again" in done.stderr
    assert not (checkout.folder / ".venv" / "installed").exists()
    assert checkout.install(HAS_TORCH="1").returncode == 0


def test_an_old_python_is_refused_and_a_new_one_looked_for(checkout: Checkout, tmp_path: Path) -> None:
    checkout.program("old", "#!/bin/sh\nexit 1\n")
    done = checkout.install("--check", PYTHON="old")
    assert done.returncode == 1
    assert "PYTHON=old is not Python 3.11 or newer" in done.stderr
    assert checkout.install("--check").stdout.strip() == "python3.13"
    for name in ("python3.14", "python3.13", "python3.12", "python3.11", "python3", "python"):
        checkout.program(name, "#!/bin/sh\nexit 1\n")
    done = checkout.install("--check")
    assert done.returncode == 1
    assert "no Python 3.11 or newer" in done.stderr
