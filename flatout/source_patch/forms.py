"""For each choice of a plan its form in source; or why it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flatout.plan_choices import ChoiceValue
from flatout.source_patch import autocast_form, loader_forms, model_forms, optimizer_forms, setting_forms
from flatout.source_patch.sources import Sources
from flatout.source_patch.tuned_loop import TunedLoop

Form = Callable[[Sources, str, ChoiceValue, TunedLoop], tuple[str, ...]]
"""(sources, choice, value, what was tuned) -> notes. It adds edits to `sources.edits`, or raises NoSourceForm."""

FORMS: Mapping[str, Form] = {
    "fetch": loader_forms.fetch,
    "pin_memory": loader_forms.pin_memory,
    "non_blocking": loader_forms.non_blocking,
    "zero_grad": optimizer_forms.zero_grad,
    "flush_denormals": setting_forms.flush_denormals,
    "threads": setting_forms.threads,
    "optimizer": optimizer_forms.optimizer,
    "cudnn_benchmark": setting_forms.cudnn_benchmark,
    "memory_format": model_forms.memory_format,
    "precision": autocast_form.precision,
    "matmul_precision": setting_forms.matmul_precision,
    "compile": model_forms.compile_model,
}

WITHOUT_FORM: Mapping[str, str] = {
    "device": "every tensor that the script makes would have to be moved",
    "devices": "each process is a run of the whole script, which Flatout starts",
    "attention": "the products and the softmax are recognized while the model runs, not in its text",
    "loss": "the loss would need a function of its own that computes the scores in chunks",
    "allocator": "it is set in the environment, before Python starts",
    "normalization": "the kernel is Flatout's own, and the script would need it to run",
    "kernels": "the kernels are Flatout's own, and the script would need it to run",
    "activation_offload": "it works through hooks on what autograd saves",
    "activation_checkpointing": "the forward of the model's class would have to be rewritten",
    "optimizer_in_backward": "it works through hooks on gradients",
    "optimizer_state": "the optimizer would be one of another library",
}
"""Of choices without a clean form in any script: why."""

RETAINED_BYTES = 64 << 20


def environment_of(choice: str, value: ChoiceValue) -> tuple[str, ...]:
    """Environment variables with which plain Python does the same; none where there are none."""
    if choice == "device" and value == "cpu":
        return ("CUDA_VISIBLE_DEVICES=",)
    if choice == "allocator" and value == "retain":
        trim = 2**31 - 1
        retained = ("MALLOC_MMAP_MAX_=0", f"MALLOC_TRIM_THRESHOLD_={trim}", f"MALLOC_TOP_PAD_={RETAINED_BYTES}")
        return (*retained, "GLIBC_TUNABLES=glibc.malloc.hugetlb=1")  # of glibc 2.35 and newer
    return ()
