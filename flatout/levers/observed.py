"""What was observed of a training loop: plain values, passed from a trial process to the code that chooses levers.

Live objects (models, optimizers, loaders) stay in `Subject`; this is their description. A field that could not be
determined is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from flatout.decoding import decode
from flatout.machine.ceilings import Ceilings, Peak
from flatout.machine.description import Machine

LAUNCH_BOUND_SECONDS = 20e-6
USUAL_BUSY_SHARE, USUAL_PRODUCTS = 0.6, 0.5
"""Where nothing was measured: the share of forward and backward in a step, and of products in these."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSeen:
    """One optimizer, as the script built it. `fused` and `foreach` are None where the script left torch's default."""

    kind: str
    parameters: int
    fused: bool | None = None
    foreach: bool | None = None
    can_fuse: bool = False
    can_foreach: bool = False
    obstacle: str = ""
    low_bit_obstacle: str | None = None
    """Why its state cannot be held in 8 bits; '' where it can, None where it was not examined."""
    made_at: str = ""
    """The line of the script's own files that made it, as 'train.py:12'; '' where that is unknown."""


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
    batch_norms: int = 0
    dtypes: tuple[str, ...] = ()
    repeated_block: str = ""
    repeated_blocks: int = 0
    """How many of these blocks there are."""
    block_shapes: int = 1
    """Of these, how many differ in the shapes of their parameters, as in a ResNet: each is compiled by itself."""
    channels_last: bool = False
    compiled: bool = False
    attention_by_hand: str = ""
    """The class of the modules that compute attention without torch's fused kernel."""
    widest_output: int = 0
    """Outputs of the widest linear layer, including one that may share an embedding's weights."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one step computes, forward, backward and update: fields of Observed."""

    flops_per_step: float | None
    operations_per_step: int
    denormal_share: float | None
    denormal_slowdown: float | None
    large_share: float | None = None
    ignored_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The loop as the script runs it."""

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
    """Does the script's own file mention a device? Then where it runs is its choice."""
    differentiates_twice: str = ""
    """Where the script asks for gradients of gradients, or may do so later; '' where nothing suggests it."""
    gradients_zeroed: bool | None = None
    """Does zero_grad fill gradients with zeros (True) or free them (False)? None: no call of it was seen."""
    orders_device_work: str = ""
    """Where the script mentions streams, non-blocking copies or addresses; '' where it does not."""
    reads_gradients: str | None = None
    """Where the script handles gradients itself (clips, logs or writes them); '' where it does not."""
    reads_optimizer_state: str | None = None
    """Where the script mentions its optimizer's state; '' where it does not."""
    update_obstacle: str | None = None
    """Why a backward pass cannot update the weights by itself; '' where it can."""
    captures_graphs: str = ""
    """Where the script mentions CUDA graphs; '' where nothing suggests it."""
    backwards_per_step: float | None = None
    flops_per_step: float | None = None
    """Floating-point operations of the products in one step."""
    large_share: float | None = None
    """Of these: in linear layers and attention that Flatout's bf16 kernels are made for."""
    ignored_share: float | None = None
    """Of these: for scores of a wide last layer whose targets are ignored, on a CPU."""
    operations_per_step: int | None = None
    """As torch dispatches them."""
    denormal_share: float | None = None
    """Of the fp32 inputs and outputs of one step's operations, as far as they were examined."""
    denormal_slowdown: float | None = None
    """How many times longer this processor takes for such values; None where a step had none."""
    page_faults_per_step: float | None = None
    """Minor faults: memory that the process had returned, or never had."""

    def share(self, kind: str) -> float | None:
        """The share of a step spent in `kind` ('data', 'forward', ...), 0 to 1; None where it was not measured."""
        if not self.step_seconds or kind not in self.breakdown_seconds:
            return None
        return self.breakdown_seconds[kind] / self.step_seconds

    @property
    def is_compiled(self) -> bool:
        """Does the script compile, or was what trains compiled before it was called?"""
        return self.compiled_in_script or any(module.compiled for module in self.modules)

    @property
    def busy_share(self) -> float:
        """The share of forward and backward passes; a typical one where it was not measured."""
        shares = [self.share(kind) for kind in ("forward", "backward")]
        return USUAL_BUSY_SHARE if None in shares else min(1.0, sum(share or 0.0 for share in shares))

    def product_share(self, machine: Machine) -> float:
        """The share of matrix products and convolutions: their operations at the measured fp32 rate of the device."""
        peak = self._peaks(machine).get("fp32")
        if peak is None or not self.flops_per_step or not self.step_seconds:
            return USUAL_PRODUCTS * self.busy_share
        return min(self.busy_share, self.flops_per_step / peak.value / self.step_seconds)

    @property
    def waits_for_launches(self) -> bool:
        """Does a GPU get its work more slowly than it does it? An operation takes the host some 5 to 10 microseconds,
        and that is about all that one of this step takes."""
        if not self.device.startswith("cuda") or not self.operations_per_step or not self.step_seconds:
            return False
        return self.busy_share * self.step_seconds / self.operations_per_step < LAUNCH_BOUND_SECONDS

    def share_of_operations(self, seconds: float) -> float:
        """The share of a step that `seconds` for each of its operations take; 0 where they were not counted."""
        if not self.operations_per_step or not self.step_seconds:
            return 0.0
        return self.operations_per_step * seconds / self.step_seconds

    def saved_by_dtype(self, machine: Machine, dtype: str) -> float:
        """The share that products in this format save at the measured rates; half of it where a rate is unknown."""
        slow, fast = self._peaks(machine).get("fp32"), self._peaks(machine).get(dtype)
        saved = 1 - slow.value / fast.value if slow and fast else 0.5
        return max(0.0, saved) * self.product_share(machine)

    def ceilings(self, machine: Machine) -> Ceilings | None:
        """Those of the device that trains; None where another device was measured, or none."""
        measured = machine.ceilings
        same = measured is not None and measured.device.partition(":")[0] == self.device.partition(":")[0]
        return measured if same else None

    def _peaks(self, machine: Machine) -> Mapping[str, Peak]:
        measured = self.ceilings(machine)
        return measured.gemm_flops_per_second if measured is not None else {}

    @property
    def loop(self) -> str:
        """What trains, in words: runs of a script with different arguments may or may not train the same loop."""
        models = [f"{one.kind} of {one.parameters:,} weights ({', '.join(one.dtypes)})" for one in self.modules]
        steps = [f"{one.kind} over {one.parameters} tensors" for one in self.optimizers]
        how = ["autocast"] * self.autocast_in_script + ["torch.compile"] * self.compiled_in_script
        return ", ".join([*models, *steps, *how, f"on {self.device.partition(':')[0]}"])

    def with_times_of(self, seen: Observed) -> Observed:
        """The same script, with the times that were seen later."""
        return replace(
            self,
            device=seen.device,
            step_seconds=seen.step_seconds,
            breakdown_seconds=seen.breakdown_seconds,
            page_faults_per_step=seen.page_faults_per_step,
        )

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Observed:
        return decode(cls, data)
