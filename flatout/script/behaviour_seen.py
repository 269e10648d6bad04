"""What a script does that neither torch's profiler nor its source alone shows: plain values, collected in one window.

Each value has the source lines of the script that it was seen at. Counts and seconds are of the whole window unless
they say 'per step'. A field that could not be determined is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from flatout.decoding import decode

SourceLine = tuple[str, int, str]
"""(file, line number, text of the line)."""
Activity = Literal[
    "plotting", "logging", "disk", "loader", "transform", "model", "backward", "optimizer", "torch", "script"
]
"""What the main thread was doing: 'transform' is the script's code inside the loader, 'torch' some other function of
torch, 'script' the script's own code outside of everything else, which may call operators."""


@dataclass(frozen=True, kw_only=True)
class ForwardSeen:
    """Calls of one outermost module at one line, in one mode."""

    module: str
    line: SourceLine
    calls: int
    training: bool
    """The module's `training` flag."""
    grad: bool
    """Was grad mode on, and did the output have a graph?"""
    used: int = 0
    """Calls whose graph a backward pass has used."""
    unused: int = 0
    """Calls whose graph is gone, or old, and was never used."""
    longest_run: int = 0
    """Calls in a row at this line with no backward pass and no optimizer step between them."""
    repeated: int = 0
    """Of these, calls with the very tensor of the call before, as where dropout is to draw several samples."""
    mode_layers: tuple[str, ...] = ()
    """Kinds of its layers that behave differently in training and evaluation."""
    updated: bool = False
    """Does an optimizer that has stepped hold parameters of it?"""
    seconds: float = 0.0
    weights: bool = True
    """Has the module parameters?"""
    recalibrates: bool = False
    """Is it called to recompute the statistics of batch normalisation?"""
    model: int = 0
    """Tells modules of one class apart."""
    learns_through_another: bool = False
    """Does it learn only through another model, which its optimizer leaves alone, as a generator through the
    discriminator that judges it?"""
    dropout_line: SourceLine | None = None
    """Where the function torch.nn.functional.dropout was called in evaluation mode without being told of the mode: its
    default is that of training."""


@dataclass(frozen=True, kw_only=True)
class BackwardSeen:
    """Backward passes that the script started at one line."""

    line: SourceLine
    calls: int
    per_step: float
    callers: int = 1
    """From how many places of the script the function with this line was called."""
    retained: int = 0
    """Those with retain_graph=True and without create_graph."""
    retained_needed: int = 0
    """Of these, how many graphs a later pass has used again."""
    scaled: bool = False
    """Does the graph end with a division or a product, as where a loss is averaged over micro-batches?"""
    reduction: str = ""
    """'mean' or 'sum', as far as the graph shows it; '' where it does not."""
    graphs: int = 0
    """Passes whose graphs were followed."""
    softmax_twice: int = 0
    """Of these, how many take log_softmax, as in a cross-entropy, of what a softmax gives."""


@dataclass(frozen=True, kw_only=True)
class ClipSeen:
    """Clipping of gradients at one line, counted in optimizer steps."""

    line: SourceLine
    steps: int
    before_backward: int = 0
    """Steps in which it came before every backward pass, and none came after the last one."""
    before_unscale: int = 0
    """Steps in which a gradient scaler was on and had not unscaled the gradients yet."""


@dataclass(frozen=True, kw_only=True)
class SchedulerSeen:
    """Steps of a learning rate scheduler at one line."""

    line: SourceLine
    calls: int
    between: int = 0
    """Calls after a backward pass and before the optimizer's step that uses it."""
    warned: bool = False
    """Has torch warned that it was called before the first optimizer step?"""


@dataclass(frozen=True, kw_only=True)
class IdleSchedulerSeen:
    """A learning rate scheduler that has not stepped, of an optimizer that has."""

    kind: str
    """'CosineAnnealingLR'."""
    steps: int
    """Of the optimizer, in the window."""


@dataclass(frozen=True, kw_only=True)
class RemadeOptimizerSeen:
    """Optimizers made for a single step each, all of the same parameters, so that none keeps its state."""

    line: SourceLine
    """Where they step."""
    kind: str
    """'Adam'."""
    remade: int
    """Steps of an optimizer made since the step before."""
    steps: int


@dataclass(frozen=True, kw_only=True)
class ParametersSeen:
    """Parameters that get gradients, are in no optimizer, and do not change."""

    names: tuple[str, ...]
    count: int
    """Numbers in them."""
    module: str
    """The kind of the model that they are in; '' where no model that trains has them, as those of a loss."""


@dataclass(frozen=True, kw_only=True)
class MadeSeen:
    """Modules with parameters that were made inside a forward pass."""

    kind: str
    line: SourceLine
    made: int
    steps: int
    """In how many steps."""


@dataclass(frozen=True, kw_only=True)
class CallSeen:
    """Calls of one method of a tensor at one line."""

    method: str
    line: SourceLine
    calls: int
    seconds: float
    repeated: int = 0
    """Conversions of a tensor that had been converted in the same way before, and had not changed."""


@dataclass(frozen=True, kw_only=True)
class LineTime:
    """Where the main thread was, by samples of its stack."""

    line: SourceLine
    activity: Activity
    seconds: float
    """Per step, on average over the window, time between steps included."""
    samples: int
    low_share: float
    """The lower end of the 95 % confidence interval of its share of the window."""
    library: str = ""
    """The installed package that the line spent most of the time in, of what is the script's own activity."""


@dataclass(frozen=True, kw_only=True)
class LayerGradients:
    """One weight of a layer: root mean square of its gradient at each step that was examined."""

    name: str
    depth: int
    """The place of the layer in the order of the model's parameters."""
    rms: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class GradientsSeen:
    """Sizes of gradients, step by step."""

    module: str
    layers: tuple[LayerGradients, ...]
    norms: tuple[float, ...]
    """Of all gradients together."""
    weight_norm: float
    largest_vectors: tuple[float, ...] = ()
    """Root mean square of the largest gradient of a bias or another vector."""
    nonfinite_steps: int = 0
    first_nonfinite: str = ""
    """The layer, in the first such step."""


@dataclass(frozen=True, kw_only=True)
class BroadcastSeen:
    """A loss of predictions and targets that are broadcast against each other, such as [80, 1] and [80]."""

    line: SourceLine
    predictions: str
    targets: str
    calls: int


@dataclass(frozen=True, kw_only=True)
class PaddingSeen:
    """Integer inputs of one embedding."""

    share: float
    """Of all positions, those in a run of the padding value at the end (or the start) of a row."""
    value: int
    positions: int
    from_padding_idx: bool
    """Does the layer name the padding value? Otherwise it is what rows of different lengths end with."""


@dataclass(frozen=True, kw_only=True)
class GraphBreakSeen:
    """Where torch.compile had to leave compiled code."""

    reason: str
    line: SourceLine
    count: int


@dataclass(frozen=True, kw_only=True)
class CompileSeen:
    """What torch.compile did until the window ended."""

    frames: int
    versions_of_one: int
    """The most compiled versions of one function."""
    compiled_in_window: int
    """Compilations after the first steps."""
    seconds_in_window: float | None
    breaks: tuple[GraphBreakSeen, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ParallelSeen:
    """A wrapper around the model: 'DataParallel' or 'DistributedDataParallel'."""

    kind: str
    devices: int
    find_unused: bool = False
    unused_parameters: int = 0
    """Parameters that got no gradient in some step."""
    synchronised_per_step: float | None = None
    """Backward passes of a step in which gradients were exchanged."""


@dataclass(frozen=True, kw_only=True)
class ChannelsLastSeen:
    """The slowest convolutions of the model, timed alone in both memory formats."""

    layers: int
    contiguous_seconds: float
    """Forward and backward, of all that were timed."""
    channels_last_seconds: float
    low_ratio: float
    """The lower end of the confidence interval of how many times as fast channels_last is."""


@dataclass(frozen=True, kw_only=True)
class RecurrentSeen:
    """A size of LSTM layer that trained on the CPU in a 16-bit format, tried alone."""

    inputs: int
    units: int
    """The hidden size."""
    dtype: str
    gradient_error: float
    """Of the input's gradient, relative to that in fp32."""


@dataclass(frozen=True, kw_only=True)
class WorkersSeen:
    """A loader that starts its worker processes again for each epoch."""

    line: SourceLine
    workers: int
    starts: int
    start_seconds: float
    """Median, from asking for an iterator to its first batch."""
    epoch_seconds: float
    """Median, from one iterator to the next."""


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """One window of a script."""

    steps: int
    """Training steps in the window."""
    seconds: float
    """Length of the window, with everything between steps."""
    device: str = "cpu"
    files: tuple[str, ...] = ()
    """The script's own source files that were imported."""
    forwards: tuple[ForwardSeen, ...] = ()
    backwards: tuple[BackwardSeen, ...] = ()
    clips: tuple[ClipSeen, ...] = ()
    schedulers: tuple[SchedulerSeen, ...] = ()
    idle_schedulers: tuple[IdleSchedulerSeen, ...] = ()
    remade_optimizers: tuple[RemadeOptimizerSeen, ...] = ()
    optimizer_dtypes: tuple[str, ...] = ()
    """Of parameters that optimizers update."""
    untrained_dtypes: tuple[str, ...] = ()
    """Of parameters that an SGD with fused=True leaves as they are."""
    optimizer_lines: tuple[SourceLine, ...] = ()
    """Where they step."""
    outside_optimizer: ParametersSeen | None = None
    devices: Mapping[str, int] = field(default_factory=dict)
    """Device -> numbers in parameters and buffers of the models that train."""
    device_example: str = ""
    """A parameter on the device with the fewest of them."""
    accumulated_steps: int = 0
    """Optimizer steps whose gradients contained those of the step before."""
    zeroed_steps: int = 0
    """Optimizer steps whose gradients did not."""
    zero_grad_line: SourceLine | None = None
    zero_grad_fills: bool | None = None
    """Does it fill gradients with zeros? None: not called."""
    zero_grad_seconds: float | None = None
    """Per step; None on a GPU, which works on after the call."""
    unchanged_share: float | None = None
    """Of numbers with a gradient other than zero, those that an optimizer step left exactly as they were."""
    weights_move: bool | None = None
    """Did any weight change in any step? None: not examined."""
    stops_where_converged: bool = False
    """Are all steps given a closure, by optimizers that end a step early where nothing is left to gain, as LBFGS?"""
    made_in_forward: tuple[MadeSeen, ...] = ()
    kept_steps: int = 0
    """Earlier steps whose graphs were still alive at the end of the window's last examined step."""
    kept_bytes_per_step: float | None = None
    live_bytes: tuple[int, ...] = ()
    """Of the tensors made in the window that Python holds, at the ends of consecutive steps."""
    broadcast_losses: tuple[BroadcastSeen, ...] = ()
    losses: tuple[float | None, ...] = ()
    """Of backward passes in order; None: NaN or infinite. Empty where passes start at several lines."""
    gradients: tuple[GradientsSeen, ...] = ()
    batch_shapes: int = 1
    """Different shapes of a model's inputs in training: the most at one line."""
    example_shapes: tuple[str, ...] = ()
    padding: PaddingSeen | None = None
    compiled: CompileSeen | None = None
    calls: tuple[CallSeen, ...] = ()
    times: tuple[LineTime, ...] = ()
    parallel: tuple[ParallelSeen, ...] = ()
    workers: WorkersSeen | None = None
    channels_last: ChannelsLastSeen | None = None
    recurrent: tuple[RecurrentSeen, ...] = ()
    recomputed_seconds: float | None = None
    """Of activation checkpointing, per step."""
    autocast_dtype: str = ""
    """In training forwards: 'float16', 'bfloat16'; '' where autocast is off."""
    scaler: bool = False
    anomaly: bool = False
    debug: tuple[str, ...] = ()
    """Settings that slow a run down for debugging."""
    seeded: bool | None = None
    """Was torch's generator seeded?"""
    denormal_share: float | None = None
    """Of the fp32 values of one step's operators; see Observed."""
    denormal_slowdown: float | None = None
    denormal_lines: tuple[SourceLine, ...] = ()
    """Of the operators with the most of them, the first one first."""
    allocated_bytes: int | None = None
    """Peak of torch's CUDA allocator in the window."""
    reserved_bytes: int | None = None
    device_allocations: int | None = None
    """Calls of cudaMalloc in the window."""
    system_seconds: float | None = None
    """CPU time per step that the process spent in the kernel: of page faults, files, locks."""
    page_fault_seconds: float | None = None
    """Of one, measured here; None where a step has few."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Behaviour:
        return decode(cls, data)
