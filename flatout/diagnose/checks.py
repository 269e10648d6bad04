"""All checks of a script, in one list, and what calls them.

check_facts(Facts(profile=profile, behaviour=behaviour, source=source, ...))    # findings, in the order of the list
"""

from __future__ import annotations

from collections.abc import Sequence

from flatout.diagnose import (
    compile_checks,
    data_checks,
    device_checks,
    layer_checks,
    learning_checks,
    memory_checks,
    mode_checks,
    parallel_checks,
    precision_checks,
    run_checks,
    time_checks,
    update_checks,
)
from flatout.diagnose.check import Check
from flatout.diagnose.facts import Facts
from flatout.diagnose.finding import Finding

# What explains the others first: without a step nothing else can be said. Then what makes the result wrong, from the
# weights outwards; then what threatens the run; then where the time goes, the usual largest losses first.
CHECKS: tuple[Check, ...] = (
    run_checks.no_step,
    run_checks.rolled_back,
    update_checks.missing_zero_grad,
    update_checks.parameters_not_in_optimizer,
    mode_checks.modules_made_in_forward,
    mode_checks.training_in_eval_mode,
    mode_checks.evaluation_in_train_mode,
    update_checks.clip_before_backward,
    update_checks.clip_before_unscale,
    precision_checks.fp16_without_scaler,
    precision_checks.bf16_lost_in_data_parallel,
    precision_checks.fused_sgd_in_16_bits,
    precision_checks.half_weights,
    precision_checks.wrong_lstm_gradients,
    update_checks.accumulation_not_averaged,
    update_checks.scheduler_order,
    update_checks.scheduler_never_steps,
    update_checks.optimizer_made_in_each_step,
    learning_checks.softmax_before_cross_entropy,
    learning_checks.loss_not_falling,
    learning_checks.exploding_gradients,
    learning_checks.vanishing_gradients,
    memory_checks.memory_nearly_out,
    memory_checks.graph_kept_by_logging,
    memory_checks.memory_leak,
    device_checks.model_on_cpu,
    device_checks.mixed_devices,
    mode_checks.anomaly_mode,
    mode_checks.debug_mode,
    parallel_checks.straggler,
    parallel_checks.exposed_communication,
    data_checks.starved_loader,
    data_checks.slow_transform,
    data_checks.per_sample_fetch,
    data_checks.worker_restart,
    time_checks.plotting_time,
    time_checks.disk_time,
    time_checks.logging_time,
    time_checks.python_time,
    device_checks.hidden_sync,
    device_checks.pageable_copies,
    device_checks.repeated_to,
    parallel_checks.thread_oversubscription,
    compile_checks.recompilations,
    compile_checks.graph_breaks,
    data_checks.tiny_batch,
    data_checks.padding_waste,
    layer_checks.unfused_attention,
    layer_checks.hand_written_layer,
    layer_checks.channels_last_missing,
    precision_checks.fp32_matmul,
    precision_checks.denormals,
    precision_checks.unaligned_shapes,
    layer_checks.huge_softmax,
    memory_checks.allocator_churn,
    memory_checks.costly_checkpointing,
    parallel_checks.data_parallel,
    parallel_checks.accumulation_without_no_sync,
    parallel_checks.needless_find_unused_parameters,
    layer_checks.cudnn_benchmark_changing_shapes,
    device_checks.slower_on_gpu,
    mode_checks.evaluation_with_grad,
    time_checks.evaluation,
    update_checks.zero_grad_fills,
    update_checks.needless_retain_graph,
    memory_checks.reserved_unused,
    mode_checks.no_seed,
)


def check_facts(facts: Facts, checks: Sequence[Check] = CHECKS) -> tuple[Finding, ...]:
    """What the checks find, in the order of the list."""
    return tuple(finding for check in checks if (finding := check(facts)) is not None)
