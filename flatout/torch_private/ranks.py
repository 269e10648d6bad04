"""The store that the ranks of torch.distributed share. Importing this imports torch.distributed.

`init_process_group` makes it and keeps it to itself; a second store would need an address of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import Store

from flatout.torch_private.lookup import private

default_store: Callable[[], Store] = private("torch.distributed.distributed_c10d._get_default_store")
