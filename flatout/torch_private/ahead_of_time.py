"""The forward and backward graphs of AOT autograd, as torch.compile would partition them. Importing this imports the
compiler.

No public API returns both graphs, the partition between them, or the decompositions of Inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from flatout.torch_private.lookup import Private, imported_from_torch, private

with imported_from_torch():
    import torch._inductor.lowering  # noqa: F401  some of its decompositions need it
    from torch._functorch.aot_autograd import aot_function as aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table as select_decomp_table
reparametrized: Callable[..., AbstractContextManager[None]] = private("torch.nn.utils.stateless._reparametrize_module")
"""Replaces the tensors of a module; the public `functional_call` also calls it, by its compiled call if any."""

Run = Callable[[list[object]], Any]  # Any: a graph takes and returns whatever the program does


def boxed(run: Run) -> Run:
    """AOT autograd then passes the only reference to the inputs, so they can be freed one by one."""
    run_of: Private = lambda args: run(args)  # noqa: E731
    run_of._boxed_call = True
    made: Run = run_of
    return made
