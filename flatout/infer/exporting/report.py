"""The result of an export: for each format a verified file, or the reason why there is none.

>>> report = ExportReport(model="Net", parameters=10, weight_bytes=40, torch_version="2.13.0", files=(), seconds=1.0)
>>> report.ok
True
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Format = Literal["pt2", "aoti", "onnx", "executorch", "torchscript"]
Dynamic = Literal["none", "batch", "length"]


@dataclass(frozen=True, kw_only=True)
class ExportCheck:
    """One run of the file beside the module, on the same inputs."""

    inputs: Literal["example", "fresh", "resampled"]
    """The user's own; newly drawn ones of the same kind; or rows resampled from the user's (where drawn ones fail)."""
    batch: int | None
    """Samples; None where no size of the inputs is a batch."""
    length: int | None
    """Positions of a sequence; None where the inputs have none that were asked to vary."""
    bit_identical: bool
    largest_difference: float
    """Largest absolute difference of all outputs; 0.0 where they are bit-identical."""
    largest_output: float
    """Largest absolute value of the module's own outputs."""


@dataclass(frozen=True, kw_only=True)
class SizeRange:
    """For which values of one varying size a file holds."""

    name: str
    """'batch' or 'length'."""
    smallest: int | None = None
    """None where nothing is known beyond what was tested."""
    largest: int | None = None
    """None where no bound was found."""
    reason: str = ""
    """What bounds it, in torch's words."""
    tested: tuple[int, ...] = ()
    """At which the file gave what the module gives."""
    refused: tuple[int, ...] = ()
    """Outside of the bounds, at which the file raised an error when it was tried."""


@dataclass(frozen=True, kw_only=True)
class ExportFailure:
    """Why there is no file: what is wrong, the limit it breaks, what to do, and the user's own line if it is known."""

    what: str
    limit: str = ""
    remedy: str = ""
    line: str | None = None


class NotExported(Exception):
    """Raised and caught inside the export only, which reports the failure."""

    def __init__(self, failure: ExportFailure) -> None:
        super().__init__(failure.what)
        self.failure = failure


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """One format: the file in its place and how it was verified, or the failure."""

    format: Format
    path: str | None
    """None where nothing was put in place."""
    bytes: int | None
    """Of the file and of what stands beside it (large ONNX weights); None without a file."""
    dynamic: tuple[str, ...] = ()
    """Sizes that may differ from the example's: 'batch', 'length'; () = all are fixed."""
    ranges: tuple[SizeRange, ...] = ()
    """Of each size in `dynamic`, where the other sizes are the example's."""
    checks: tuple[ExportCheck, ...] = ()
    tolerance: float | None = None
    """Largest difference allowed, as a share of the largest output (at least of 1); None where nothing was compared."""
    failure: ExportFailure | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    """To write, load and verify it; the first format's hold the trace, which all share."""

    @property
    def bit_identical(self) -> bool:
        """Every output of every check is bit-identical to the module's."""
        return bool(self.checks) and all(check.bit_identical for check in self.checks)

    @property
    def largest_difference(self) -> float | None:
        """Of all checks; None where nothing was compared."""
        return max((check.largest_difference for check in self.checks), default=None)


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """One export of one model, in every format that was asked for."""

    model: str
    """The class."""
    parameters: int
    weight_bytes: int
    """Parameters and buffers, each once (tied weights are one)."""
    torch_version: str
    files: tuple[ExportedFile, ...]
    seconds: float
    """In all, the shared trace included."""
    notes: tuple[str, ...] = ()
    """What holds for every format."""

    @property
    def ok(self) -> bool:
        """Every format that was asked for has a verified file."""
        return all(file.failure is None for file in self.files)

    def to_json(self) -> dict[str, object]:
        """Bytes and seconds; unknown is None."""
        files = []
        for file in self.files:
            found = {"bit_identical": file.bit_identical, "largest_difference": file.largest_difference}
            files.append({**asdict(file), **found})
        return {**asdict(self), "files": files, "ok": self.ok}
