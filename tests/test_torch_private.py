"""torch's private names that Flatout uses: listed, so that a new torch that lacks one says so here and not in a run.

Seen in torch 2.13 (CPU) and 2.15 (CUDA). After a change that was meant, correct the list.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

PACKAGE = Path(__file__).parents[1] / "flatout"


def _private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split(".")[1:])


def used() -> set[str]:
    """Every dotted name below torch with a private part, as it stands in a `from torch... import` or an expression."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name.startswith("torch.")}
            elif isinstance(node, ast.Attribute):
                found.add(ast.unparse(node))
    names = {name for name in found if name.startswith("torch.") and _private(name) and "(" not in name}
    return {name for name in names if not any(other.startswith(name + ".") for other in names)}


LISTED = {
    "torch.Tensor._make_wrapper_subclass",
    "torch._C.DisableTorchFunction",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C.TensorBase",
    "torch._C._DisableTorchDispatch",
    "torch._C._autograd._profiler_enabled",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._cuda_clearCublasWorkspaces",
    "torch._C._current_autograd_node",
    "torch._C._current_graph_task_id",
    "torch._C._dynamo.eval_frame._set_lru_cache",
    "torch._C._functorch.maybe_current_level",
    "torch._C._get_tracing_state",
    "torch._C._storage_Use_Count",
    "torch._dynamo.config",
    "torch._dynamo.exc.TorchDynamoException",
    "torch._dynamo.exc.UserError",
    "torch._dynamo.utils.counters",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._functorch.aot_autograd.aot_function",
    "torch._functorch.config",
    "torch._functorch.partitioners.min_cut_rematerialization_partition",
    "torch._inductor.aoti_compile_and_package",
    "torch._inductor.aoti_load_package",
    "torch._inductor.codecache",
    "torch._inductor.config",
    "torch._inductor.cpp_builder",
    "torch._inductor.decomposition.select_decomp_table",
    "torch._inductor.exc.InductorError",
    "torch._inductor.list_mode_options",
    "torch._inductor.lowering",
    "torch._int_mm",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeCopyMode",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
    "torch.autograd._get_sequence_nr",
    "torch.compiler._is_compiling_flag",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.conv._ConvNd",
    "torch.nn.modules.loss._Loss",
    "torch.nn.utils.stateless._reparametrize_module",
    "torch.ops.aten._local_scalar_dense.default",
    "torch.ops.aten._scaled_dot_product_efficient_attention",
    "torch.ops.aten._unsafe_view.default",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported",
    "torch.ops.mkldnn._linear_pointwise",
    "torch.ops.mkldnn._reorder_linear_weight",
    "torch.overrides._get_current_function_mode",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch._get_current_dispatch_mode",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
    "torch.utils.data._utils.collate.default_collate_fn_map",
    "torch.utils.data._utils.fetch._MapDatasetFetcher",
    "torch.utils.data._utils.worker",
    "torch.utils.data.dataloader._BaseDataLoaderIter",
}

OF_CUDA_BUILDS = {"torch._C._cuda_clearCublasWorkspaces"}

TAKES = {
    "torch._functorch.aot_autograd.aot_function": {
        "fn",
        "fw_compiler",
        "bw_compiler",
        "partition_fn",
        "decompositions",
    },
    "torch._functorch.partitioners.min_cut_rematerialization_partition": {"joint_module"},
    "torch._inductor.aoti_compile_and_package": {"exported_program", "package_path"},
    "torch._inductor.aoti_load_package": {"path"},
    "torch._inductor.decomposition.select_decomp_table": set(),
    "torch._inductor.list_mode_options": {"mode"},
    "torch._subclasses.fake_tensor.FakeTensorMode": {"allow_non_fake_inputs"},
    "torch._subclasses.fake_tensor.FakeCopyMode": {"fake_mode"},
    "torch.nn.utils.stateless._reparametrize_module": {"module", "parameters_and_buffers"},
    "torch.utils._pytree.tree_leaves": {"tree"},
    "torch.utils._pytree.tree_map_only": {"func", "tree"},
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": {"t"},
}
"""Parameters of those that are plain Python."""


def test_every_private_name_is_listed() -> None:
    assert used() == LISTED


def _found(name: str) -> Any:
    parts = name.split(".")
    place: Any = importlib.import_module("torch")
    for index, part in enumerate(parts[1:]):
        if not hasattr(place, part):
            importlib.import_module(".".join(parts[: index + 2]))
        place = getattr(place, part)
    return place


@pytest.mark.parametrize("name", sorted(LISTED))
def test_it_is_there(name: str) -> None:
    if name in OF_CUDA_BUILDS and not torch.backends.cuda.is_built():
        pytest.skip("torch was built without CUDA")
    _found(name)


@pytest.mark.parametrize(("name", "taken"), TAKES.items())
def test_it_takes_what_we_give(name: str, taken: set[str]) -> None:
    assert taken <= inspect.signature(_found(name)).parameters.keys()
