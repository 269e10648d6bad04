"""The disk's ceiling: a file of our own is written, dropped from the page cache and read, and removed again.

Whether the disk is a real one or a network's or a hypervisor's cache, no program can see: the rate is that of the
file system that holds Flatout's cache.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from flatout.machine.ceilings import Peak
from flatout.machine.probe import peak_of
from flatout.timing import Measurement
from flatout.units import format_bytes

MIB = 1024**2
_IN_MEMORY = ("tmpfs", "ramfs")


def disk_peak(folder: Path, seconds: float, *, size_bytes: int = 128 * MIB) -> tuple[Peak | None, str]:
    """Sequential reading in that folder; or None and why."""
    if not hasattr(os, "posix_fadvise"):
        return None, "this system cannot drop a file from its page cache"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (kind := file_system_of(folder)) in _IN_MEMORY:
            return None, f"{folder} is in memory ({kind})"
        if shutil.disk_usage(folder).free < 4 * size_bytes:
            return None, f"less than {format_bytes(4 * size_bytes)} free in {folder}"
        with tempfile.NamedTemporaryFile(dir=folder, prefix="disk-probe-") as file:
            samples = _read_samples(file.fileno(), size_bytes, seconds)
    except OSError as error:
        return None, f"{folder}: {error.strerror}"
    return peak_of(samples, size_bytes, "B/s", f"{format_bytes(size_bytes)} in sequence, page cache dropped"), ""


def _read_samples(file: int, size_bytes: int, seconds: float) -> Measurement:
    block = os.urandom(MIB)  # nothing that a file system could compress
    for _ in range(size_bytes // MIB):
        os.write(file, block)
    os.fsync(file)  # only clean pages can be dropped
    samples: list[float] = []
    buffer = bytearray(4 * MIB)
    end = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < end:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(file, 0, os.SEEK_SET)
        start = time.perf_counter()
        while os.readv(file, [buffer]):
            pass
        samples.append(time.perf_counter() - start)
        if sum(samples) > 4 * seconds:  # a very slow disk: one reading must do
            break
    return Measurement(name="disk read", samples_seconds=tuple(samples))


_ESCAPE = re.compile(r"\\(\d{3})")
"""Of a space in the name of a mount."""


def file_system_of(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The kind of file system that holds the path: the mount with the longest matching prefix."""
    try:
        rows = [line.split() for line in os.fsdecode(mounts.read_bytes()).splitlines()]
    except OSError:
        return None
    kinds = {_ESCAPE.sub(lambda found: chr(int(found[1], 8)), row[1]): row[2] for row in rows if len(row) > 2}
    holding = [folder for folder in kinds if path.resolve().is_relative_to(folder)]
    return kinds[max(holding, key=len)] if holding else None
