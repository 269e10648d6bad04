"""One checkpoint written by several ranks: each its own parts, rank 0 the rest, the manifest and the name.

They speak through the store by which the ranks found one another, and not through collectives, which would mix with
those of the training. Rank 0 makes the unfinished folder and says where it is; every other rank writes its file and
says how large it is, with its checksum; rank 0 waits for all of them, writes the manifest and renames the folder. A
checkpoint of which a part is missing is never one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.checkpoint.manifest import StoredFile
from flatout.checkpoint.rank_generators import WAIT_SECONDS
from flatout.errors import MachineError, describe_error
from flatout.machine.ranks import joined_rank, joined_ranks
from flatout.torch_private.ranks import default_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_SECONDS = 0.05


class SharedSave:
    """One save, on one of its ranks. Made by all ranks in the same order."""

    def __init__(self) -> None:
        self.rank, self.ranks = joined_rank(), joined_ranks()
        self._store: Store = default_store()
        number = self._store.add(f"flatout/saves/{self.rank}", 1)
        self._key = f"flatout/saves/{number}"

    # rank 0

    def begin(self, folder: Path, step: int) -> None:
        """Tell the others where to write."""
        self._tell("folder", {"path": str(folder.absolute()), "step": step})

    def collected(self, folder: Path) -> dict[str, StoredFile]:
        """The others' files, once all are written. Raises MachineError if one was not, or is not in this folder."""
        files = {}
        otherwise = "did not write its part of the checkpoint"
        heard = {rank: self._heard(str(rank), f"rank {rank} {otherwise}") for rank in range(1, self.ranks)}
        for rank, said in heard.items():  # only now: a failure deletes the folder, where nobody may be writing then
            if "error" in said:
                raise MachineError(
                    f"rank {rank} could not write its part of the checkpoint: {said['error']}",
                    limit="the checkpoints before it are untouched",
                )
            name, size, checksum = str(said["name"]), int(str(said["size_bytes"])), str(said["sha256"])
            if not (folder / name).exists() or (folder / name).stat().st_size != size:
                raise MachineError(
                    f"rank {rank} wrote its part of the checkpoint to {folder}, and it is not here",
                    limit="all ranks write into one folder",
                    remedy="name a folder that all machines share",
                )
            files[name] = StoredFile(size_bytes=size, sha256=checksum)
        for what in ("folder", *map(str, range(1, self.ranks))):  # read by all who read them
            self._store.delete_key(f"{self._key}/{what}")
        return files

    # the others

    def write(self, fill: Callable[[Path], tuple[str, StoredFile]], step: int) -> None:
        """Write into the folder that rank 0 made; fill(folder) returns the file's name and what it holds.

        Writes nothing where rank 0 could make none, which is raised there: raised here as well, it would end the next
        save on this rank alone. Raises MachineError if rank 0 says nothing or saves another step, and what `fill`
        raises, of which rank 0 is told.
        """
        try:
            said = self._heard("folder", "rank 0 began no checkpoint")
            if "error" in said:
                return
            if said["step"] != step:
                raise MachineError(
                    f"rank 0 saves step {said['step']}, and rank {self.rank} step {step}",
                    limit="a checkpoint holds one step of all ranks",
                    remedy="call Checkpoints.save on every rank, equally often",
                )
            name, file = fill(Path(str(said["path"])))
        except BaseException as error:
            self.cancel(error)
            raise
        self._tell(str(self.rank), {"name": name, "size_bytes": file.size_bytes, "sha256": file.sha256})

    # both

    def cancel(self, error: BaseException) -> None:
        """Tell the others that there is nothing to write to; or rank 0 that this rank has written nothing."""
        self._tell("folder" if self.rank == 0 else str(self.rank), {"error": describe_error(error)})

    def _tell(self, what: str, content: dict[str, object]) -> None:
        self._store.set(f"{self._key}/{what}", json.dumps(content))

    def _heard(self, what: str, otherwise: str) -> dict[str, object]:
        """What another rank tells. Asks again and again: to wait in the store would keep this process's other threads
        from using it."""
        key, until = f"{self._key}/{what}", time.monotonic() + WAIT_SECONDS
        while not self._store.check([key]):
            if time.monotonic() > until:
                raise MachineError(
                    f"{otherwise} within {WAIT_SECONDS:.0f} s",
                    limit="a checkpoint of several ranks is whole only with the parts of all",
                    remedy="call Checkpoints.save on every rank, equally often",
                )
            time.sleep(POLL_SECONDS)
        said: dict[str, object] = json.loads(self._store.get(key))
        return said
