"""Was that error the end of the memory?"""

from __future__ import annotations

_WORDS = (
    "defaultcpuallocator: can't allocate memory",  # torch's CPU allocator raises a plain RuntimeError
    "not enough memory: you tried to allocate",  # the same on other platforms
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "std::bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for the device's and the host's ends of memory. Where torch has no type of its own, by its words."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)
