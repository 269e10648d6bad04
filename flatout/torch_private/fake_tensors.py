"""Tensors with shape, dtype and lifetime but no memory. Importing this imports torch.

The public `meta` device does not record which device a tensor is for, which decides what its kernels save.
"""

from __future__ import annotations

from flatout.torch_private.lookup import imported_from_torch

with imported_from_torch():
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensorException

LOGGER = "torch._subclasses.fake_tensor"
"""The logger that prints a traceback for every operation that fails on fake tensors."""
