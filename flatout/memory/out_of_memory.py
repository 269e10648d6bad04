"""Was that error an out-of-memory error?"""

from __future__ import annotations

_WORDS = (
    "defaultcpuallocator: can't allocate memory",  # torch's CPU allocator raises a plain RuntimeError
    "not enough memory: you tried to allocate",  # the same on other platforms
    "error: out of memory",  # of the CUDA or HIP runtime or driver, outside of torch's allocator
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "std::bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True where the device or the host is out of memory. Where torch has no exception type for it, by the message."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)
