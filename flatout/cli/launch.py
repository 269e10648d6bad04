"""flatout launch: the same script on many devices or machines, a rank on each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flatout.errors import UsageError

if TYPE_CHECKING:
    from flatout.parallel.launch_request import Launch
    from flatout.parallel.launching.rank_count import RankCount
    from flatout.script.entry import Target

Kind = Literal["slurm", "kubernetes"]
ANY_HOST = "machine-0:29500"
Machines = Annotated[
    str, typer.Option(metavar="N", help="Machines; 2:4, as of torchrun: 4, or at least --min-nnodes 2.")
]
LeastMachines = Annotated[
    int | None, typer.Option(metavar="N", help="With how many the job goes on after it has lost others.")
]
HangTimeout = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="A rank that has made steps of a TrainStep, and none for so long, hangs; 0: never."
    ),
]
Rendezvous = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where machine 0 listens for the others.")]
MachineNumber = Annotated[
    int | None,
    typer.Option(metavar="N", help="Which machine this is; default: 0 is the one with HOST, the others follow."),
]


def launch(
    target: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT", help="The script and its own arguments, or -m MODULE.")
    ] = None,
    nproc_per_node: Annotated[
        str, typer.Option(metavar="N", help="Ranks on each machine; auto: one for each GPU, or one without any.")
    ] = "auto",
    nnodes: Machines = "1",
    min_nnodes: LeastMachines = None,
    node_rank: MachineNumber = None,
    rendezvous: Rendezvous = None,
    interface: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The network to listen on and to train over: eth0, or its address here."),
    ] = None,
    join_timeout: Annotated[str, typer.Option(metavar="TIME", help="How long machines wait for one another.")] = "60s",
    max_restarts: Annotated[
        int, typer.Option(metavar="N", help="How often all ranks start again after one has failed or hangs.")
    ] = 0,
    hang_timeout: HangTimeout = "600s",
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="What ranks have to save and end, before they are killed.")
    ] = "30s",
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Has to be the same on all machines; default: flatout.toml, where it is."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run no script: measure ranks and network, and name what is slow.")
    ] = False,
    manifest: Annotated[
        Kind | None, typer.Option(metavar="KIND", help="Print the job for a scheduler: slurm or kubernetes.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say only why the job failed.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="With --check: print one JSON document and nothing else.")
    ] = False,
) -> int:
    """Start a script once for each GPU, on one machine or several, and watch all of them until they end.

    What runs under torchrun runs here: ranks get the same variables. Their lines are printed whole, each with its rank.
    A rank that fails, is killed, or hangs in training with a TrainStep is named, and the others are ended; with
    --max-restarts all start again, and the script resumes from its checkpoints. Exit code: that of the first rank that
    failed, 128 + the signal's number if it was killed, 124 if ranks hang.
    """
    from flatout.parallel.launch_request import Launch
    from flatout.parallel.launching.launch import launch as run_job
    from flatout.parallel.launching.rank_count import AUTO, count_ranks
    from flatout.parallel.manifests import manifest as manifest_text
    from flatout.report import launch_text
    from flatout.units import parse_seconds

    script = _script(target, check=check, manifest=manifest, json=json)
    counted = count_ranks(nproc_per_node) if manifest is None else _counted_for_others(nproc_per_node)
    machines, least_machines = _machines(nnodes, min_nnodes)
    if manifest is not None and rendezvous is None and machines > 1:
        rendezvous = ANY_HOST  # the scheduler knows the machines
    request = Launch(
        command=(sys.executable, *(script.command if script is not None else ())),
        nproc_per_node=counted.ranks,
        nnodes=machines,
        min_nnodes=least_machines,
        node_rank=node_rank,
        rendezvous=_host_and_port(rendezvous) if rendezvous is not None else None,
        interface=interface,
        join_seconds=parse_seconds(join_timeout),
        max_restarts=max_restarts,
        hang_seconds=parse_seconds(hang_timeout),
        grace_seconds=parse_seconds(grace),
        quiet=quiet,
        script=Path(script.path) if script is not None and script.path is not None else None,
        plan=plan if manifest is not None else _plan_file(plan),
    )
    if manifest is not None:
        print(manifest_text(manifest, request, tuple(target or ())), end="")
        return 0
    if nproc_per_node == AUTO and not counted.gpus and not quiet:
        launch_text.tell_count(counted)
    if check:
        return _check(request, json=json)
    return run_job(request, tell=launch_text.tell, gpus=counted.gpus)


def _machines(nnodes: str, min_nnodes: int | None) -> tuple[int, int | None]:
    """How many, and with how many the job goes on."""
    least, between, most = nnodes.rpartition(":")
    try:
        wanted, given = int(most), int(least) if between else min_nnodes
    except ValueError:
        limit = "it is a number of machines, or the fewest and the most"
        raise UsageError(f"--nnodes is {nnodes!r}", limit=limit, remedy="for example --nnodes 4, or 2:4") from None
    if between and min_nnodes not in (None, given):
        limit = "both say with how many machines the job goes on"
        raise UsageError(f"--nnodes {nnodes} and --min-nnodes {min_nnodes}", limit=limit, remedy="give one of them")
    return wanted, given


def _script(target: list[str] | None, *, check: bool, manifest: Kind | None, json: bool) -> Target | None:
    """The script that ranks run; None where they only measure. UsageError for options that contradict each other."""
    from flatout.script.entry import Target

    if json and not check:
        raise UsageError("--json without --check", limit="otherwise the output is the ranks'")
    if check and manifest is not None:
        raise UsageError("--check and --manifest", limit="one measures, the other prints", remedy="use one of them")
    if not target and not check:
        raise UsageError("no script was given", remedy="for example: flatout launch train.py --its-own-options")
    if not target:
        return None
    script = Target.from_command(target)
    if manifest is None:  # other machines will run that of a manifest
        script.check_exists()
    return script


def _counted_for_others(asked: str) -> RankCount:
    """Of machines that are not this one."""
    from flatout.parallel.launching.rank_count import RankCount, ranks_asked

    ranks = ranks_asked(asked)
    if ranks is None:
        raise UsageError(
            "--nproc-per-node is 'auto'",
            limit="a manifest is for machines that are not this one",
            remedy="give the number of GPUs that each has: --nproc-per-node 8",
        )
    return RankCount(ranks=ranks, gpus=0, reason="as asked")


def _check(request: Launch, *, json: bool) -> int:
    from flatout.parallel.preflight import preflight
    from flatout.report import launch_text
    from flatout.report.document import document, to_text
    from flatout.report.preflight_text import preflight_text

    found = preflight(request, tell=launch_text.tell)
    print(to_text(document("preflight", found.to_json())) if json else preflight_text(found))
    return 0


def _plan_file(named: Path | None) -> Path | None:
    from flatout.application.applied_plan import PLAN_NAME

    if named is not None and not named.is_file():
        raise UsageError(f"no such plan: {named}", remedy="leave --plan out where the script has none")
    default = Path(PLAN_NAME)
    return named or (default if default.is_file() else None)


def _host_and_port(text: str) -> tuple[str, int]:
    """'node0:29500', '10.0.0.1:29500' or '[2001:db8::1]:29500'."""
    from flatout.parallel.launching.rank_count import MOST_DIGITS
    from flatout.plan_document import short

    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    whole = colon and bare and not (":" in bare and bare == host)
    digits = port.isascii() and port.isdecimal() and len(port) <= MOST_DIGITS
    if not (whole and digits) or not 0 < int(port) < 65_536:
        raise UsageError(
            f"--rendezvous is {short(text)}",
            limit="it is a host and a port from 1 to 65535",
            remedy="write it as node0:29500 or [2001:db8::1]:29500",
        )
    return bare, int(port)
