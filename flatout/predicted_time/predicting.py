"""`flatout.whatif`: a training step on devices that are not here, and on this machine under other settings.

found = flatout.whatif(step, batch, devices=["h100", "rtx-4090"])
found["h100"].step_seconds, found["h100"].peak_bytes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flatout.arguments import as_plan, as_whole_number, described, wrong
from flatout.errors import FlatoutError, UsageError, describe_error
from flatout.machine.published_peaks import GpuEntry, catalogue_entry
from flatout.plan import Plan
from flatout.plan_choices import declared
from flatout.precision.matmul import current_matmul_precision
from flatout.predicted_time.gpu_rates import H100, MEASURED_ON, gpu_time
from flatout.predicted_time.prediction import Prediction, WhatIf
from flatout.predicted_time.replayed import NotReplayableError, followed, replayed
from flatout.profiling.roofline import SHORT_DTYPES
from flatout.profiling.step_operators import Operator, StepOperators
from flatout.sizing.training import Training
from flatout.timing import LoadWatch, contention
from flatout.train.step import TrainStep

USUAL_DEVICES = ("rtx-4090", "l4", "l40s", "a100-80gb", "h100", "h200", "b200", "rtx-5090")
UNCERTAINTY, UNCERTAINTY_ASSUMED, UNCERTAINTY_RECURRENT = 0.3, 0.5, 0.6
"""As a share: of GPUs like the one that was measured; of others, where it is an assumption; of recurrent layers, of
which one model alone was measured."""
UNCERTAINTY_HERE = 0.2
"""Of nine in ten steps of 6 small models under another precision, batch size or number of threads, on an Intel Xeon."""
UNCERTAINTY_BUSY, UNCERTAINTY_MOST = 0.5, 0.9
"""Where other work kept this machine busy meanwhile, at least; and at most."""
MATERIAL_DOUBT = 0.25
MEASURED_CAPABILITY = (9, 0)
ROOM = 0.8
"""Of a GPU's memory: tensors of a script that take less leave enough for what else is there."""
HOST_NOTE = (
    "bound by the host: launching one operator after the other takes longer than computing them. Its time is that of "
    "one virtual machine (Intel Xeon); another may need half, or twice as long. Larger batches, CUDA graphs and "
    "torch.compile help there"
)
CPU = "cpu"
DEVICES_ARE = "it is a list of names, such as ['h100', 'cpu']"
PRICES_ARE = "it is a dict, of an hour by device, such as {'h100': 2.49}"


def whatif(
    step: TrainStep,
    batch: object,
    *,
    devices: Sequence[str] | None = None,
    plan: Plan | None = None,
    batch_size: int | None = None,
    threads: int | None = None,
    prices: Mapping[str, float] | None = None,
) -> WhatIf:
    """What a call of `step` would take on other devices, and on this machine under other settings.

    batch: any batch of the right kinds and shapes. devices: GPUs of the catalogue ('h100', 'rtx-4090'), which need not
    be here, and 'cpu', this machine; None: eight usual GPUs. plan: another plan than the step's; it is predicted as far
    as operators, their shapes and dtypes follow from it, and torch.compile is not. batch_size: with so many samples.
    threads: of 'cpu'. prices: of an hour by device, for the price of a million samples.

    GPUs are predicted from the operators of a step on fake tensors, the published figures of the GPU, and the shares of
    them that an H100 was measured to reach; waiting for data is no part of it. 'cpu' takes the present step a few times
    and each operator of both by itself, some seconds; weights are as before afterwards. Peak memory is that of
    `flatout.forecast`.

    Raises UsageError for what is no TrainStep, a device that is not known, and options that mean nothing.
    """
    training = Training.of(step, batch)
    wanted = training if plan is None else training.under(as_plan(plan, "step"))
    samples = training.samples_wanted(batch_size)
    if threads is not None:
        as_whole_number(threads, "threads")
    names, priced = _asked(devices, prices)
    if threads is not None and CPU not in names:
        raise UsageError(f"threads is {threads}", limit="it is for the device 'cpu'", remedy="devices=['cpu', ...]")
    gpus = [catalogue_entry(name) for name in names if name != CPU]
    found: list[Prediction] = []
    notes = _notes(wanted.plan, names)
    tf32 = (wanted.plan.matmul_precision or current_matmul_precision()) != "highest"
    if gpus:
        operators = _followed(wanted, samples)
        for gpu in gpus:
            predicted = on_gpu(operators, gpu, samples=samples, tf32=tf32)
            found.append(_with_memory(predicted, wanted, gpu, samples))
        notes += work_notes(operators)
    if CPU in names:
        found.append(_here(training, wanted, samples, threads or wanted.plan.threads))
    return whatif_of(
        found,
        name=type(step.model).__name__,
        samples=samples,
        precision=_precision(wanted, tf32=tf32),
        prices=priced,
        notes=notes,
    )


def of_script(
    step: StepOperators,
    *,
    name: str,
    devices: Sequence[str] | None,
    tf32: bool,
    peak_bytes: int | None,
    prices: Mapping[str, float] | None,
    notes: Sequence[str] = (),
) -> WhatIf:
    """Of a script that was followed on a CPU. peak_bytes: of its tensors there; None: unknown."""
    operators = step.as_on_cuda()
    found = []
    names, priced = _asked(devices, prices)
    for key in names:
        gpu = catalogue_entry(key)
        one = on_gpu(operators, gpu, samples=step.samples, tf32=tf32)
        if peak_bytes is None:
            found.append(replace(one, peak_reason="the script's memory could not be followed"))
        else:
            fits = True if peak_bytes < ROOM * gpu.memory_bytes else False if peak_bytes > gpu.memory_bytes else None
            found.append(replace(one, peak_bytes=peak_bytes, fits=fits))
    half = half_products(operators)
    precision = f"{half} where it casts, else fp32" if half else _fp32_products(tf32)
    notes = [*notes, *work_notes(operators)]
    return whatif_of(found, name=name, samples=step.samples, precision=precision, prices=priced, notes=notes)


def work_notes(operators: Iterable[Operator]) -> list[str]:
    """What is not known of them."""
    names = ", ".join(dict.fromkeys(one.name for one in operators if one.uncounted))
    return [f"predicted by their bytes alone, as their FLOPs are unknown: {names}"] if names else []


def half_products(operators: Iterable[Operator]) -> str:
    """The precision of 16 bits in which some have products, as 'bf16'; '' where none has."""
    return next((SHORT_DTYPES[one.dtype] for one in operators if one.half and one.flops), "")


def on_gpu(operators: Sequence[Operator], gpu: GpuEntry, *, samples: int | None, tf32: bool) -> Prediction:
    """Without its memory."""
    measured = gpu.compute_capability == MEASURED_CAPABILITY
    basis = f"published figures of the GPU, at the shares that an {MEASURED_ON} was measured to reach"
    nothing = Prediction(
        device=gpu.key,
        name=gpu.name,
        step_seconds=None,
        samples=samples,
        memory_bytes=gpu.memory_bytes,
        watts=gpu.watts,
        basis=basis,
    )
    try:
        time = gpu_time(operators, gpu, H100, tf32=tf32)
    except KeyError as error:
        return replace(nothing, reason=f"no rate of {gpu.name} in {error.args[0]} is published in the catalogue")
    uncertainty = UNCERTAINTY if measured else UNCERTAINTY_ASSUMED
    if any(kind.startswith("recurrent") for kind in time.by_kind):
        uncertainty = UNCERTAINTY_RECURRENT
    return replace(
        _within(nothing, time.step_seconds, uncertainty),
        device_seconds=time.device_seconds,
        host_seconds=time.host_seconds,
        by_kind=time.by_kind,
    )


def _within(one: Prediction, seconds: float, uncertainty: float) -> Prediction:
    """A prediction that is `uncertainty` too low is of a step that takes 1 / (1 - uncertainty) times as long."""
    return replace(
        one, step_seconds=seconds, low_seconds=seconds / (1 + uncertainty), high_seconds=seconds / (1 - uncertainty)
    )


def whatif_of(
    predictions: Iterable[Prediction],
    *,
    name: str,
    samples: int | None,
    precision: str,
    prices: Mapping[str, float],
    notes: Sequence[str] = (),
) -> WhatIf:
    """Sorted, with prices."""
    priced = [replace(one, price_per_hour=prices.get(one.device)) for one in predictions]
    bound = any(one.bound == "host" for one in priced)
    ordered = sorted(priced, key=lambda one: (one.step_seconds is None, one.step_seconds or 0.0))
    return WhatIf(
        name=name,
        samples=samples,
        precision=precision,
        predictions=tuple(ordered),
        notes=(*notes, *([HOST_NOTE] if bound else [])),
    )


def check_devices(devices: Sequence[str] | None, prices: Mapping[str, float] | None) -> None:
    """UsageError for what is not in the catalogue, before anything takes time."""
    names, _ = _asked(devices, prices)
    if CPU in names:
        raise UsageError("the device 'cpu'", limit="scripts are predicted on GPUs of the catalogue")


def _asked(devices: Sequence[str] | None, prices: Mapping[str, float] | None) -> tuple[list[str], dict[str, float]]:
    """(the devices, prices of an hour), by their names in the catalogue."""
    names, given = _device_names(devices), _prices(prices)
    other = next((name for name in given if name not in names), None)
    if other is not None:
        raise UsageError(f"a price of {other!r}", limit=f"prices are of the devices asked for: {', '.join(names)}")
    return names, given


def _prices(prices: Mapping[str, float] | None) -> dict[str, float]:
    found: dict[str, float] = {}
    if prices is not None and not isinstance(prices, Mapping):
        raise wrong("prices", prices, PRICES_ARE)
    for name, price in (prices or {}).items():
        if not isinstance(name, str):
            raise UsageError(f"prices has the key {described(name)}", limit=PRICES_ARE)
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < float("inf"):
            raise UsageError(f"the price of {name!r} is {price!r}", limit="it is a number above 0, of one hour")
        found[name if name == CPU else catalogue_entry(name).key] = float(price)
    return found


def _device_names(devices: Sequence[str] | None) -> list[str]:
    if devices is None:
        return list(USUAL_DEVICES)
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise wrong("devices", devices, DEVICES_ARE)
    if not devices:
        raise UsageError("devices is empty", limit=DEVICES_ARE, remedy="leave it out for eight usual GPUs")
    for one in devices:
        if not isinstance(one, str):
            raise UsageError(f"devices has {described(one)} in it", limit=DEVICES_ARE)
    return list(dict.fromkeys(one if one == CPU else catalogue_entry(one).key for one in devices))


def _followed(training: Training, samples: int) -> tuple[Operator, ...]:
    try:
        return followed(training, samples, as_on_cuda=True)
    except FlatoutError:
        raise
    except Exception as error:  # control flow depends on values, or an operation has no fake form: .numpy()
        raise UsageError(
            f"the step cannot be followed on fake tensors: {describe_error(error)}",
            limit="without them a GPU that is not here cannot be predicted",
            remedy="as a script it can: flatout whatif train.py",
        ) from error


def _with_memory(one: Prediction, training: Training, gpu: GpuEntry, samples: int) -> Prediction:
    from flatout.sizing.forecasting import forecast_training
    from flatout.sizing.target import find_target

    try:
        forecast = forecast_training(training, find_target(gpu.key, training.model), samples)
    except FlatoutError as error:
        return replace(one, peak_reason=error.what)
    return replace(one, peak_bytes=forecast.peak_bytes, fits=forecast.fits)


def _here(training: Training, wanted: Training, samples: int, threads: int | None) -> Prediction:
    from flatout.machine.detect import available_memory_bytes, detect
    from flatout.sizing.forecasting import forecast_training
    from flatout.sizing.target import find_target

    nothing = Prediction(
        device=CPU,
        name=detect().cpu.name,
        step_seconds=None,
        samples=samples,
        memory_bytes=available_memory_bytes(),
        basis="the present step, and each operator of both steps by itself, timed on this machine",
    )
    if training.device_type != CPU:
        return replace(nothing, reason=f"the model is on {training.device_type}, and the present step is what is timed")
    load = LoadWatch()
    try:
        time = replayed(training, wanted, samples=training.samples, other_samples=samples, threads=threads)
    except NotReplayableError as error:
        return replace(nothing, reason=str(error))
    except FlatoutError:
        raise
    except Exception as error:  # a step that cannot run on fake tensors, or not at all
        return replace(nothing, reason=describe_error(error))
    forecast = forecast_training(wanted, find_target(CPU, training.model), samples)
    missing = ", ".join(time.left_out)
    uncertainty, notes = _doubts(time.doubt, contention(load.read()))
    return replace(
        _within(nothing, time.step_seconds, uncertainty),
        present_seconds=time.present_seconds,
        notes=notes,
        basis=f"{nothing.basis}, but for {missing}" if missing else nothing.basis,
        device_seconds=time.step_seconds,
        peak_bytes=forecast.peak_bytes,
        fits=forecast.peak_bytes * (1 + forecast.uncertainty) <= available_memory_bytes(),
    )


def _doubts(doubt: float, contended: str | None) -> tuple[float, tuple[str, ...]]:
    """(uncertainty, notes) of a prediction on this machine. doubt: as of ReplayedTime."""
    notes = [contended] if contended is not None else []
    if doubt > MATERIAL_DOUBT:
        notes.append(f"unstable: times that should be equal differed by {doubt:.0%}")
    if not notes:
        return UNCERTAINTY_HERE, ()
    notes[-1] += "; the range is wider for it; try again when the machine is idle"
    return min(UNCERTAINTY_MOST, max(UNCERTAINTY_BUSY, UNCERTAINTY_HERE + doubt)), tuple(notes)


def _precision(training: Training, *, tf32: bool) -> str:
    """Of its products: that of autocast, else of the weights."""
    if training.plan.precision is not None:
        found = {str(training.plan.precision)}
    else:
        weights = (one.dtype for one in training.model.parameters() if one.is_floating_point())
        found = {SHORT_DTYPES.get(name, name) for name in (str(one).removeprefix("torch.") for one in weights)}
    return " and ".join(_fp32_products(tf32) if one == "fp32" else one for one in sorted(found or {"fp32"}))


def _fp32_products(tf32: bool) -> str:
    return "TF32 where the GPU has it" if tf32 else "fp32"


def _notes(plan: Plan, devices: Sequence[str]) -> list[str]:
    from flatout.sizing.training import carried_out

    found = ["waiting for data is not included"]
    if plan.compile is not None:
        found.append("torch.compile is not predicted: the steps are those of the uncompiled model")
    predicted = {*carried_out(plan).choices(), "compile", *(("threads",) if CPU in devices else ())}
    if CPU not in devices:
        predicted.add("matmul_precision")
    left = [name for name in plan.choices() if name not in predicted and declared()[name].aim == "time"]
    if left:
        found.append(f"not predicted, so as without: {', '.join(left)}")
    return found
