"""The store shared by all ranks of torch.distributed. Importing this imports torch.distributed.

`init_process_group` creates it without exposing it; a second store would need its own address.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import Store

from flatout.torch_private.lookup import private

default_store: Callable[[], Store] = private("torch.distributed.distributed_c10d._get_default_store")
