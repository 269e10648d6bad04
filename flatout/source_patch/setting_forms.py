"""Settings of the whole process: one line after the import of torch."""

from __future__ import annotations

from flatout.plan_choices import ChoiceValue
from flatout.source_patch.sources import Sources
from flatout.source_patch.tuned_loop import TunedLoop

Notes = tuple[str, ...]


def threads(sources: Sources, choice: str, value: ChoiceValue, tuned: TunedLoop) -> Notes:
    return _set(sources, choice, f".set_num_threads({value})")


def flush_denormals(sources: Sources, choice: str, value: ChoiceValue, tuned: TunedLoop) -> Notes:
    """Threads that are started later take the flag over, and OpenMP starts its workers at the first large operation."""
    return _set(sources, choice, ".set_flush_denormal(True)")


def cudnn_benchmark(sources: Sources, choice: str, value: ChoiceValue, tuned: TunedLoop) -> Notes:
    return _set(sources, choice, f".backends.cudnn.benchmark = {value}")


def matmul_precision(sources: Sources, choice: str, value: ChoiceValue, tuned: TunedLoop) -> Notes:
    lines = [f'.set_float32_matmul_precision("{value}")']
    if value == "medium":  # oneDNN has switches of their own for these
        lines += [f'.backends.mkldnn.{one}.fp32_precision = "bf16"' for one in ("conv", "rnn")]
    return _set(sources, choice, *lines)


def _set(sources: Sources, choice: str, *lines: str) -> Notes:
    file = sources.script
    torch = sources.torch_name(file, choice)
    code = "".join(f"{torch}{line}\n" for line in lines)
    sources.edits.insert_after(file, sources.where_torch_is(file), choice, code)
    return ()
