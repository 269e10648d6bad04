"""What the control group leaves of the machine. A container sees all cores and all memory, and may use few of them.

Both generations are read: v2 keeps `cpu.max` and `memory.max` in one tree, v1 one tree a controller. A limit on any
ancestor binds, so every folder from the process's own up to the root is asked and the smallest answer counts. Inside a
container the path in /proc/self/cgroup may not exist below the mount; then only its ancestors answer, which is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60  # v1 writes 'no limit' as the largest page-aligned number


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """Limits and use; None: no limit (or no cgroups)."""

    quota_cores: float | None
    memory_limit_bytes: int | None
    memory_used_bytes: int | None  # without file pages that can be dropped at once


def read_cgroup(process_file: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> Cgroup:
    """The limits that bind this process."""
    paths = _paths_by_controller(_text(process_file) or "")
    quotas = [q for folder in _folders(paths, mount, "cpu") if (q := _quota_cores(folder)) is not None]
    limits = [(m, folder) for folder in _folders(paths, mount, "memory") if (m := _memory_limit(folder)) is not None]
    limit, folder = min(limits, key=lambda pair: pair[0], default=(None, None))
    return Cgroup(
        quota_cores=min(quotas, default=None),
        memory_limit_bytes=limit,
        memory_used_bytes=None if folder is None else _memory_used(folder),
    )


def _paths_by_controller(text: str) -> dict[str, str]:
    """'4:memory:/a' -> {'memory': '/a'}; v2's line '0::/a' has the empty name."""
    paths = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _folders(paths: dict[str, str], mount: Path, controller: str) -> Iterator[Path]:
    trees = [(mount / controller, paths.get(controller)), (mount, paths.get("")), (mount / "unified", paths.get(""))]
    for tree, path in trees:
        if path is not None:
            folder = tree / path.lstrip("/")
            yield from (f for f in (folder, *folder.parents) if f.is_relative_to(tree))


def _quota_cores(folder: Path) -> float | None:
    v2 = (_text(folder / "cpu.max") or "").split()
    quota, period = v2 if len(v2) == 2 else (_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))
    if quota is None or period is None or not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None  # 'max' in v2, -1 in v1
    return int(quota) / int(period)


def _memory_limit(folder: Path) -> int | None:
    text = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes") or ""
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED_BYTES else None


def _memory_used(folder: Path) -> int | None:
    text = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes") or ""
    if not text.isdecimal():
        return None
    stat = dict(line.split(maxsplit=1) for line in (_text(folder / "memory.stat") or "").splitlines() if " " in line)
    droppable = stat.get("total_inactive_file") or stat.get("inactive_file") or "0"
    return max(0, int(text) - int(droppable))


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
