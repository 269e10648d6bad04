"""The same `flatout launch`, as a file for a scheduler of many machines: Slurm or Kubernetes.

    print(manifest("slurm", Launch(command=..., nnodes=4, nproc_per_node=8, rendezvous=("a", 29500)), ("train.py",)))

For Kubernetes it is a JobSet, which the Kubernetes project itself maintains: it gives every pod a name that does not
change, behind a headless service that it makes, and starts no launcher of its own. A PyTorchJob would set torchrun's
variables too, and belongs to a Kubeflow operator whose successor is built on JobSet.

No environment variable is copied into a manifest, neither this process's nor the request's: a manifest is kept in
repositories and shown to others. A comment says where they belong.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import Literal, get_args

from flatout.errors import UsageError
from flatout.parallel.launch_request import Launch

Kind = Literal["slurm", "kubernetes"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PORT = 29500
"""Of the rendezvous, where the request names none: torchrun's."""
_OPTIONS = {
    "min_nnodes": "--min-nnodes",
    "join_seconds": "--join-timeout",
    "max_restarts": "--max-restarts",
    "hang_seconds": "--hang-timeout",
    "grace_seconds": "--grace",
    "interface": "--interface",
    "plan": "--plan",
}
"""Of the request's fields that a manifest passes on where they are set; the others it writes itself."""
_MOST_NAME_CHARACTERS = 40
"""With what is appended to it, the name of a pod stays within the 63 characters of a DNS label."""
_SECONDS_LEFT = 10
"""Seconds that a pod has beyond the launcher's own grace period."""
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def manifest(kind: Kind, request: Launch, script_command: Sequence[str]) -> str:
    """A file for that scheduler, which starts `flatout launch` once on each machine.

    script_command: what follows the options of `flatout launch`: the script and its arguments. The scheduler gives the
    machines their numbers and the rendezvous its host; of the request's rendezvous only the port is used.

    Raises UsageError for another kind, an empty command, or an argument that no file can hold.
    """
    if kind not in KINDS:
        raise UsageError(f"the manifest is for {kind!r}", limit=f"it is for one of {', '.join(KINDS)}")
    if isinstance(script_command, str) or not script_command:
        raise UsageError(
            f"script_command is {script_command!r}", limit="it is a list of words", remedy="for example ['train.py']"
        )
    for word in (*script_command, request.interface or "", str(request.plan or "")):
        _check_word(word)
    return (_slurm if kind == "slurm" else _kubernetes)(request, tuple(script_command))


def _check_word(word: str) -> None:
    """A program is given no NUL; and bytes of a file name that are no text have no place in a text file."""
    if not isinstance(word, str):
        raise UsageError(f"an argument is {word!r}", limit="arguments are text")
    if "\0" in word or any("\ud800" <= character <= "\udfff" for character in word):
        raise UsageError(f"the argument {word!r} is not text in UTF-8", limit="a manifest is a text file")


def _options(request: Launch) -> list[str]:
    """Those that hold on every machine."""
    words = ["--nnodes", str(request.nnodes), "--nproc-per-node", str(request.nproc_per_node)]
    defaults = Launch(command=request.command)
    for name, option in _OPTIONS.items():
        value = getattr(request, name)
        if value != getattr(defaults, name):
            text = f"{value:.6f}".rstrip("0").rstrip(".") + "s" if name.endswith("_seconds") else str(value)
            words.append(f"{option}={text}")  # with '=', a value may begin with a dash
    if request.quiet:
        words.append("--quiet")
    return words


def _port(request: Launch) -> int:
    return request.rendezvous[1] if request.rendezvous else PORT


def _job_name(script_command: Sequence[str]) -> str:
    """From the script's name: lower-case letters, digits and dashes, as in a DNS label."""
    words = [word for word in script_command if not word.startswith("-")]
    stem = PurePath(words[0]).stem if words else ""
    plain = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:_MOST_NAME_CHARACTERS].strip("-")
    return f"flatout-{plain}" if plain else "flatout"


# Slurm


def _slurm(request: Launch, script_command: tuple[str, ...]) -> str:
    several = request.nnodes > 1
    elastic = request.min_nnodes is not None and request.min_nnodes < request.nnodes
    lines = [
        "#!/bin/bash",
        "# Submit with: sbatch FILE",
        f"#SBATCH --job-name={_job_name(script_command)}",
        f"#SBATCH --nodes={request.nnodes}",
        "#SBATCH --ntasks-per-node=1",
        "# One GPU for each rank; remove this line for ranks on CPUs.",
        f"#SBATCH --gpus-per-node={request.nproc_per_node}",
        *(["# The job goes on without a machine that is lost.", "#SBATCH --no-kill"] if elastic else []),
        "# Add what your site asks for: --partition, --account, --time, --cpus-per-task.",
        "",
        "set -euo pipefail",
        "",
        "# Activate the environment in which flatout is installed here.",
        *_variables_comment(request, "# "),
        "# Keep secrets out of this file: read them from one that only you can read, for example",
        '#   set -a; source "$HOME/.job-secrets"; set +a',
        "",
    ]
    fixed = ["flatout", "launch"]
    words = _options(request)
    command: list[str]
    if several:
        lines += [
            "# The first machine is where the others meet; each learns its number from Slurm.",
            'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            f'rendezvous="${{hosts[0]}}:{_port(request)}"',
            "",
        ]
        start = f"""bash -c 'exec {shlex.join(fixed)} --node-rank "$SLURM_NODEID" "$@"' flatout"""
        command = [start, "--rendezvous", '"$rendezvous"', shlex.join(words), shlex.join(script_command)]
    else:
        command = [shlex.join(fixed), shlex.join(words), shlex.join(script_command)]
    stop = "0" if elastic else "1"
    lines.append(f"exec srun --kill-on-bad-exit={stop}{' --no-kill' if elastic else ''} {' '.join(command)}")
    return "\n".join(lines) + "\n"


# Kubernetes


def _kubernetes(request: Launch, script_command: tuple[str, ...]) -> str:
    name = _job_name(script_command)
    several = request.nnodes > 1
    words = ["launch", *_options(request)]
    if several:
        words += ["--rendezvous", f"{name}-machine-0-0.{name}:{_port(request)}"]
    passed = [_without_references(word) for word in words]
    if several:
        passed += ["--node-rank", "$(MACHINE)"]
    passed += [_without_references(word) for word in script_command]
    restarts = 0 if request.min_nnodes is None else max(request.max_restarts, 1) * request.nnodes
    seconds = math.ceil(request.grace_seconds) + _SECONDS_LEFT
    lines = [
        "# Apply with: kubectl apply -f FILE. It needs JobSet: https://jobset.sigs.k8s.io",
        "apiVersion: jobset.x-k8s.io/v1alpha2",
        "kind: JobSet",
        "metadata:",
        f"  name: {name}",
        "spec:",
        "  network:",
        "    # A headless service, by which the machines find the first one before it is ready.",
        "    enableDNSHostnames: true",
        f"    subdomain: {name}",
        "    publishNotReadyAddresses: true",
        "  replicatedJobs:",
        "    - name: machine",
        "      replicas: 1",
        "      template:",
        "        spec:",
        "          completionMode: Indexed",
        f"          completions: {request.nnodes}",
        f"          parallelism: {request.nnodes}",
        "          # Ranks are started again by flatout, a lost machine by Kubernetes.",
        f"          backoffLimit: {restarts}",
        "          template:",
        "            spec:",
        "              restartPolicy: Never",
        f"              terminationGracePeriodSeconds: {seconds}",
        "              containers:",
        "                - name: ranks",
        "                  # Name your image: one that holds flatout and the script.",
        '                  image: "IMAGE"',
        '                  command: ["flatout"]',
        "                  args:",
        *(f"                    - {_yaml_text(word)}" for word in passed),
        "                  env:",
        "                    - name: MACHINE",
        "                      valueFrom:",
        "                        fieldRef:",
        "                          fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']",
        *_variables_comment(request, "                    # "),
        "                  # Keep secrets in a Secret, and name it here:",
        "                  # envFrom:",
        "                  #   - secretRef:",
        "                  #       name: job-secrets",
        "                  resources:",
        "                    limits:",
        "                      # One GPU for each rank; remove this line for ranks on CPUs.",
        f"                      nvidia.com/gpu: {request.nproc_per_node}",
        "                  volumeMounts:",
        "                    - name: shared-memory",
        "                      mountPath: /dev/shm",
        "              volumes:",
        "                # Between ranks and loader workers; a container's own has 64 MiB.",
        "                - name: shared-memory",
        "                  emptyDir:",
        "                    medium: Memory",
    ]
    return "\n".join(lines) + "\n"


def _without_references(word: str) -> str:
    """Kubernetes replaces $(NAME) in arguments; a doubled dollar stands for one."""
    return word.replace("$", "$$")


def _yaml_text(word: str) -> str:
    """A double-quoted scalar: JSON's, in which YAML would end a line at some more characters, or refuse them."""
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(word, ensure_ascii=False))


def _variables_comment(request: Launch, start: str) -> list[str]:
    """The names of the request's variables, for users to set here: values are not written down."""
    names = [name for name, _ in request.variables if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
    return [f"{start}Set here, as on the command line: {', '.join(names)}"] if names else []
