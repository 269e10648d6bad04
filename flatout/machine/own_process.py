"""What the kernel counts for this process: resident memory and page faults.

Every `flatout run` imports this before the script starts, so it imports hardly anything itself.
"""

from __future__ import annotations

import os
import resource


def resident_bytes() -> int:
    """Resident memory of this process now."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def minor_faults() -> int:
    """Of this process so far, all threads together."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
