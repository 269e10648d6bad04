"""Run one public script in a fresh copy of its checkout, so that no run sees what another one left behind."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scripts.catalogue import OWN_EXAMPLES, PublicScript

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
PACKAGES = HERE / "standins" / "packages"
SEEDING = HERE / "standins" / "seeded"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What one command left: its exit code, what it printed, how long it took and how long cores worked for it."""

    exit_code: int | None  # None: it was stopped at its time limit
    stdout: str
    stderr: str
    seconds: float
    cpu_seconds: float  # with the children that were waited for; tells a slow run from a busy machine


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """A private copy of a checkout with its stand-in data, and the environment to run the script in."""

    checkout: Path
    directory: Path  # inside the checkout: where the script is started
    environment: Mapping[str, str]

    def run(self, command: Sequence[str], *, limit_seconds: float) -> Finished:
        """Run to the end, or to the limit; what the command started dies with it."""
        start, cpu_start = time.perf_counter(), children_cpu_seconds()
        process = subprocess.Popen(
            command,
            cwd=self.directory,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        exit_code: int | None = None
        try:
            stdout, stderr = process.communicate(timeout=limit_seconds)
            exit_code = process.returncode
        except subprocess.TimeoutExpired:
            stop_session(process)
            stdout, stderr = process.communicate()
        except BaseException:
            stop_session(process)
            raise
        return Finished(
            exit_code=exit_code,
            stdout=stdout,
            stderr=stderr,
            seconds=time.perf_counter() - start,
            cpu_seconds=children_cpu_seconds() - cpu_start,
        )


def children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def stop_session(process: subprocess.Popen[str]) -> None:
    """End a command and everything it started: politely, then not."""
    for number, patience_seconds in ((signal.SIGINT, 15), (signal.SIGKILL, 15)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience_seconds)


def find_checkout(script: PublicScript, checkouts: Path) -> Path | None:
    folder = PROJECT if script.repository == OWN_EXAMPLES else checkouts / script.checkout_name
    return folder if (folder / script.directory / script.argv[0]).is_file() else None


def copy_checkout(script: PublicScript, checkout: Path, target: Path) -> None:
    if script.repository == OWN_EXAMPLES:
        shutil.copytree(checkout / script.directory, target / script.directory)
    else:
        shutil.copytree(checkout, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))


def build_environment(env: Mapping[str, str], checkout: Path, *, seeded_here: bool) -> dict[str, str]:
    """Our own environment with the script's; PYTHONPATH holds only what the script and its seeding need."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {name: value.format(checkout=checkout, packages=PACKAGES) for name, value in env.items()}
    if seeded_here:
        rest = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(SEEDING), *([rest] if rest else [])])
    environment["PYTHONHASHSEED"] = "0"
    return environment


@contextlib.contextmanager
def fresh_workspace(script: PublicScript, checkout: Path, *, tuned: bool = False) -> Iterator[Workspace]:
    """A copy for one run; with `tuned` the full-size run that tuning looks at, unseeded where the script is."""
    env = script.tuned_env if tuned and script.tuned_env is not None else script.env
    stand_in: Callable[[Path], None] | None = script.stand_in
    if tuned and script.tuned_stand_in is not None:
        stand_in = script.tuned_stand_in
    with tempfile.TemporaryDirectory(prefix=f"{script.name}-") as name:
        copy = Path(name).resolve()
        copy_checkout(script, checkout, copy)
        directory = (copy / script.directory).resolve()
        if stand_in is not None:
            stand_in(directory)
        environment = build_environment(env, copy, seeded_here=not tuned and not script.seeded)
        yield Workspace(checkout=copy, directory=directory, environment=environment)


def split_command(words: str) -> list[str]:
    """A command given on the command line, with {python} for the interpreter that runs this."""
    return [word.format(python=sys.executable) for word in words.split()]
