"""What `flatout launch` is asked for: a command, how many times it is started, and on how many machines.

The command is the full argv of each rank. A rank learns who it is from torchrun's variables (RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR, ...), so that whatever runs under torchrun runs here.

    Launch(command=(sys.executable, "train.py"), nproc_per_node=2)
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatout.errors import UsageError
from flatout.plan_document import short

MOST_RANKS = 1024
"""On one machine: more is a slip of the keyboard."""
MOST_MACHINES = 100_000


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One job, as one of its machines is asked to start it; every machine is asked for the same, but for `node_rank`.

    Raises UsageError for values that are out of range or contradict each other.
    """

    command: tuple[str, ...]
    """The argv of every rank, the interpreter included: ("/usr/bin/python", "-m", "flatout", "run", "train.py")."""
    nproc_per_node: int = 1
    """Ranks on this machine."""
    nnodes: int = 1
    """Machines, this one included."""
    min_nnodes: int | None = None
    """With how many machines the job goes on after others were lost; None: with all of them only."""
    node_rank: int | None = None
    """Which machine this is, from 0; None: 0 is the one that has the rendezvous' address, the others as they arrive."""
    rendezvous: tuple[str, int] | None = None
    """Host and port where machine 0 listens for the others; None: there are no others."""
    interface: str | None = None
    """The network interface, by its name or its address, to listen on and to use between ranks; None: the one that
    has the rendezvous' address, or that leads there."""
    join_seconds: float = 60.0
    """How long machines wait for one another."""
    max_restarts: int = 0
    """How often all ranks are started again after one has failed or hangs."""
    hang_seconds: float = 600.0
    """A rank that has trained and then completes no step for this long hangs; 0: never."""
    grace_seconds: float = 30.0
    """Between SIGTERM and SIGKILL."""
    quiet: bool = False
    """Say nothing but errors. The ranks' own output is not touched."""
    stdout_of: Literal["all", "first"] = "all"
    """Whose standard output is passed on: every rank's, or rank 0's alone. Standard error is passed on from all."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of the ranks, beside those of this process: (name, value)."""
    script: Path | None = None
    """The file that is trained by; it has to be the same on all machines. None: not compared."""
    plan: Path | None = None
    """The plan that the ranks will use, compared likewise."""

    def __post_init__(self) -> None:
        self._check_words()
        _check_count("nproc_per_node", self.nproc_per_node, at_most=MOST_RANKS)
        _check_count("nnodes", self.nnodes, at_most=MOST_MACHINES)
        if self.min_nnodes is not None:
            _check_count("min_nnodes", self.min_nnodes, at_most=self.nnodes)
        if not _is_whole(self.max_restarts) or self.max_restarts < 0:
            raise UsageError(f"max_restarts is {self.max_restarts!r}", limit="it is a whole number, 0 or more")
        for name in ("join_seconds", "hang_seconds", "grace_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise UsageError(f"{name} is {value!r}", limit="it is a number, 0 or more, and finite")
        self._check_machines()

    def _check_words(self) -> None:
        """What the system takes as the argv and the environment of a process."""
        if not self.command or isinstance(self.command, str):
            raise UsageError(
                "the command is empty" if not self.command else f"the command is {self.command!r}",
                limit="ranks run a command, given as words",
                remedy="give one: ('python', 'x.py')",
            )
        for word in self.command:
            if not isinstance(word, str) or "\0" in word:
                raise UsageError(f"a word of the command is {word!r}", limit="it is text without a NUL character")
        for name, value in self.variables:
            texts = isinstance(name, str) and isinstance(value, str)
            if not texts or not name or "=" in name or "\0" in name + value:
                raise UsageError(
                    f"the variable {name!r} cannot be set",  # its value may be a secret
                    limit="a name and a value are text without a NUL character, and a name has no '='",
                )

    def _check_machines(self) -> None:
        if self.rendezvous is not None:
            self._check_rendezvous(*self.rendezvous)
        if self.nnodes > 1 and self.rendezvous is None:
            raise UsageError(
                f"{self.nnodes} machines, and no rendezvous",
                limit="they have to find one another",
                remedy="add --rendezvous HOST:PORT, where HOST is the first machine's name or address",
            )
        number, last = self.node_rank, self.nnodes - 1
        if number is not None and not (_is_whole(number) and 0 <= number <= last):
            raise UsageError(f"node_rank is {number!r}", limit=f"machines are numbered from 0 to {last}")

    @staticmethod
    def _check_rendezvous(host: str, port: int) -> None:
        remedy = "use: --rendezvous HOST:29500"
        if not (isinstance(host, str) and host and _is_whole(port) and 0 < port < 65_536):
            raise UsageError(
                f"the rendezvous is {host!r}, port {port!r}",
                limit="it has a host, and a port from 1 to 65535",
                remedy=remedy,
            )
        try:
            host.encode("idna")
        except UnicodeError as error:
            raise UsageError(
                f"the rendezvous' host is {short(host)}",
                limit="the parts of a name, between dots, have 1 to 63 characters",
                remedy=remedy,
            ) from error
        if _is_anywhere(host):
            raise UsageError(
                f"the rendezvous' host is {host}",
                limit="that is every address of whichever machine it is on: the others cannot find machine 0 by it",
                remedy="name machine 0's own address, by which the others reach it",
            )

    @property
    def address(self) -> str | None:
        """The rendezvous as it is written: HOST:PORT, with brackets around an IPv6 address."""
        if self.rendezvous is None:
            return None
        host, port = self.rendezvous
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_anywhere(host: str) -> bool:
    """Is it the address by which a program listens on all of its machine's?"""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def _check_count(name: str, value: int, *, at_most: int) -> None:
    if not _is_whole(value) or not 1 <= value <= at_most:
        raise UsageError(f"{name} is {value!r}", limit=f"it is from 1 to {at_most}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
