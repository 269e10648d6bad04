"""What was seen of a training loop: plain values that travel from a trial process to whoever chooses levers.

Live objects (models, optimizers, loaders) stay in `Subject`; this is their description. A field that could not be
found out is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OptimizerSeen:
    """One optimizer, as the script built it. `fused` and `foreach` are None where the script left torch's default."""

    kind: str
    parameters: int
    fused: bool | None = None
    foreach: bool | None = None
    can_fuse: bool = False
    can_foreach: bool = False
    sparse_gradients: bool = False
    obstacle: str = ""


@dataclass(frozen=True, kw_only=True)
class LoaderSeen:
    """One DataLoader that fed training. `fetch` is the batched strategy that fits, or '' with `fetch_obstacle`."""

    dataset: str
    samples: int | None
    batch_size: int | None
    workers: int
    pin_memory: bool
    persistent_workers: bool
    fetch: str = ""
    fetch_obstacle: str = ""
    batches_per_epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModuleSeen:
    """One outermost module that was called with gradients enabled."""

    kind: str
    parameters: int
    convolutions: int = 0
    linears: int = 0
    recurrent: int = 0
    dtypes: tuple[str, ...] = ()
    repeated_block: str = ""
    channels_last: bool = False
    compiled: bool = False
    attention_by_hand: str = ""
    """The class of the modules that compute attention without torch's fused kernel."""
    widest_output: int = 0
    """Outputs of the widest linear layer, or of one that an embedding's weights may serve."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The loop as it runs today."""

    device: str = "cpu"
    step_kind: str = "optimizer"
    step_seconds: float | None = None
    breakdown_seconds: Mapping[str, float] = field(default_factory=dict)
    optimizers: tuple[OptimizerSeen, ...] = ()
    loaders: tuple[LoaderSeen, ...] = ()
    modules: tuple[ModuleSeen, ...] = ()
    threads: int = 1
    threads_set_by_script: bool = False
    autocast_in_script: bool = False
    scaler_in_script: bool = False
    compiled_in_script: bool = False
    matmul_precision: str = "highest"
    flush_denormals: bool = False
    cudnn_benchmark: bool = False
    deterministic_algorithms: bool = False
    names_device: bool = False
    """Does the script's own file speak of a device? Then where it runs is its choice."""
    differentiates_twice: str = ""
    """Where the script asks for gradients of gradients, or may come to; '' where nothing speaks for it."""
    seeded_by_script: bool = False
    backwards_per_step: float | None = None

    def share(self, kind: str) -> float | None:
        """The share of a step that goes to `kind` ('data', 'forward', ...), 0 to 1; None where it was not measured."""
        if not self.step_seconds or kind not in self.breakdown_seconds:
            return None
        return self.breakdown_seconds[kind] / self.step_seconds

    @property
    def loop(self) -> str:
        """What trains, in words: two runs of a script with other arguments may train the same, or not."""
        models = [f"{one.kind} of {one.parameters:,} weights ({', '.join(one.dtypes)})" for one in self.modules]
        steps = [f"{one.kind} over {one.parameters} tensors" for one in self.optimizers]
        how = ["autocast"] * self.autocast_in_script + ["torch.compile"] * self.compiled_in_script
        return ", ".join([*models, *steps, *how, f"on {self.device.partition(':')[0]}"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Observed:
        fields = dict(data)
        fields["optimizers"] = tuple(OptimizerSeen(**item) for item in data.get("optimizers", ()))
        fields["loaders"] = tuple(LoaderSeen(**item) for item in data.get("loaders", ()))
        fields["modules"] = tuple(
            ModuleSeen(**{**item, "dtypes": tuple(item.get("dtypes", ()))}) for item in data.get("modules", ())
        )
        return cls(**fields)
