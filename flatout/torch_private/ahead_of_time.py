"""AOT autograd's graphs of a forward and its backward, as torch.compile would cut them. Importing this imports the
compiler.

Nothing public gives both graphs, the partition between them, or the decompositions that Inductor compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from flatout.torch_private.lookup import imported_from_torch, private

with imported_from_torch():
    import torch._inductor.lowering  # noqa: F401  some of its decompositions look there
    from torch._functorch.aot_autograd import aot_function as aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table as select_decomp_table
reparametrized: Callable[..., AbstractContextManager[None]] = private("torch.nn.utils.stateless._reparametrize_module")
"""A module with other tensors in it; the public `functional_call` also calls it, by its compiled call if it has one."""

Run = Callable[[list[Any]], Any]  # Any: a graph takes and returns whatever the program does


def boxed(run: Run) -> Run:
    """AOT autograd hands over the only reference to the inputs then, so that they can be freed one by one."""
    run_of: Any = lambda args: run(args)  # noqa: E731  Any: functions have no attribute of this name
    run_of._boxed_call = True
    made: Run = run_of
    return made
