"""What the bench found, as values that can be written as JSON and read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from flatout.bench.workload import Compared, Role
from flatout.decoding import decode
from flatout.machine.description import Machine
from flatout.statistics import Comparison, compare_paired, median


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """How many times as fast one is as another, by paired turns."""

    ratio: float
    low: float | None
    """Of the 95 % confidence interval; None: too few pairs for one."""
    high: float | None
    pairs: int

    @classmethod
    def of(cls, found: Comparison) -> Speedup:
        low, high = (found.low, found.high) if found.has_interval else (None, None)
        return cls(ratio=found.ratio, low=low, high=high, pairs=found.pairs)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A contender's turns."""

    name: str
    role: Role
    how: str
    """Its settings in words."""
    seconds: tuple[float, ...]
    """Of each turn."""
    losses: tuple[float, ...] = ()
    """Of each turn of training."""
    first_seconds: float
    """Preparation and first turn, compilation included."""
    peak_bytes: int | None
    """Resident in its process on a CPU, of tensors on a GPU, once warm; None: unknown."""
    difference: float | None = None
    """Of its outputs from the plain ones: relative, in the Euclidean norm, or the share of other tokens; None: losses
    are compared, or it is the plain contender."""
    other_numbers: str = ""
    """Why its speed is not compared with the peers'."""

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A peer's setting that was tried, so that its fastest takes part."""

    name: str
    how: str
    seconds: float | None
    """Of a turn; None: it failed."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkloadResult:
    """One workload: a row for each contender that ran."""

    key: str
    title: str
    unit: str
    """What is counted per second, in the plural."""
    size: str
    """Of one turn, in words."""
    items: int
    """Of one turn."""
    guides: str
    """What the guides state; '' if nothing."""
    compared: Compared
    """How a row's `difference` is meant."""
    flops: float | None
    """Of one turn, without padding; None: not counted."""
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]
    """Contender -> why it has no row."""
    tried: tuple[Tried, ...] = ()

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def plain(self) -> Row | None:
        return next((row for row in self.rows if row.role == "plain"), None)

    def items_per_second(self, row: Row) -> float:
        return self.items / row.median_seconds

    def against_plain(self, row: Row) -> Speedup | None:
        plain = self.plain()
        return None if plain is None or row is plain else _speedup(plain, row)

    def ours(self) -> Row | None:
        """Flatout's fastest among those that do the peers' work."""
        return self._fastest("flatout")

    def peer(self) -> Row | None:
        return self._fastest("peer")

    def against_peer(self) -> Speedup | None:
        """Ours beside the fastest peer; None where one of the two has no row."""
        ours, peer = self.ours(), self.peer()
        return None if ours is None or peer is None else _speedup(peer, ours)

    def _fastest(self, role: Role) -> Row | None:
        rows = [row for row in self.rows if row.role == role and not row.other_numbers]
        return min(rows, key=lambda row: row.median_seconds, default=None)


def _speedup(base: Row, row: Row) -> Speedup:
    return Speedup.of(compare_paired(base.seconds, row.seconds))


@dataclass(frozen=True, kw_only=True)
class OneMachine:
    """Where a bench ran."""

    machine: Machine
    device: str
    quick: bool
    versions: Mapping[str, str | None]
    """Package -> version, of torch and of the peers; None: not installed."""
    contended: bool | None
    """Did others keep the processor busy meanwhile? None: unknown."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class BenchResult(OneMachine):
    """The table: the contenders of a workload in turns."""

    workloads: tuple[WorkloadResult, ...]

    def share_of_ceiling(self, workload: WorkloadResult, row: Row) -> float | None:
        """The work's operations over what the fastest measured product does in that time; None: one is unknown."""
        ceilings = self.machine.ceilings
        here = ceilings is not None and ceilings.device.startswith(self.device)
        best = ceilings.best_gemm() if ceilings is not None and here else None
        if best is None or workload.flops is None:
            return None
        return workload.flops / row.median_seconds / best[1].value

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> BenchResult:
        """Raises TypeError for anything that `to_json` does not write."""
        result = decode(cls, data)
        for row in (row for one in result.workloads for row in one.rows):
            if not (row.seconds and min(row.seconds) > 0):
                raise TypeError(f"{row.name} has no times above 0")
        return result
