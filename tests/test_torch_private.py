"""Only `flatout/torch_private` uses torch's private names, and torch has them: a new torch that lacks one says so here
and not in a run.

Seen in torch 2.13 (CPU) and 2.15 (CUDA). After a change that was meant, correct the list.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.errors import MachineError
from flatout.torch_private import attributes, compiler, dispatch, loading, lookup, modules, tensors
from tests.processes import Python
from tests.syntax_trees import clear_trees as clear_trees
from tests.syntax_trees import name_of, nodes, root_of

PACKAGE = Path(__file__).parents[1] / "flatout"
ADAPTER = PACKAGE / "torch_private"

SHARED = {
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_version"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    "_post_accumulate_grad_hooks",
}
"""Used everywhere by these names; see the package's docstring."""

NOT_TORCHS = {
    *("_asdict", "_fields"),  # of a named tuple
    *("_getframe", "_current_frames", "_exit", "_inst", "_run_module_as_main", "_Error"),  # Python's own
    *("_new_buffer", "_subclass_zeros"),  # torchao's
}


def outside() -> Iterator[tuple[Path, ast.AST]]:
    """Every node of the package's source that is not the adapter's, nor an import for type checkers alone."""
    paths = (path for path in sorted(PACKAGE.rglob("*.py")) if ADAPTER not in path.parents)
    return ((path, node) for path in paths for node in nodes(path, types=False))


def _private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split(".")[1:])


def _is_torchs(name: str) -> bool:
    return name.startswith("torch.") and _private(name) and "(" not in name


def names_in(node: ast.AST) -> Iterator[str]:
    """Private names below torch in an import, an expression, or a text that is nothing else."""
    if isinstance(node, ast.ImportFrom) and not node.level:
        yield from filter(_is_torchs, (f"{node.module}.{alias.name}" for alias in node.names))
    elif isinstance(node, ast.Import):
        yield from filter(_is_torchs, (alias.name for alias in node.names))
    elif isinstance(node, ast.Attribute) and root_of(node) == "torch" and _is_torchs(name := ast.unparse(node)):
        yield name
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"torch(\.\w+)+", node.value):
        yield from filter(_is_torchs, [node.value])


def used(source: str) -> set[str]:
    names = {name for node in ast.walk(ast.parse(source)) for name in names_in(node)}
    return {name for name in names if not any(other.startswith(name + ".") for other in names)}


def test_only_the_adapter_uses_private_names() -> None:
    found = [f"{path.relative_to(PACKAGE)}: {name}" for path, node in outside() for name in names_in(node)]
    assert found == []


def test_only_the_adapter_uses_private_attributes() -> None:
    """Those that no class of ours has; `getattr(x, "_name")` counts as `x._name`."""
    ours = {name for _, node in outside() for name in _defined(node)}
    accesses = {name for _, node in outside() if (name := _accessed(node)) is not None}
    foreign = {name for name in accesses if name.startswith("_") and not name.startswith("__")} - ours
    assert foreign <= SHARED | NOT_TORCHS


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        yield node.name
    elif (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and getattr(node.value, "id", None) == "self"
    ):
        yield node.attr
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def _accessed(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call) and name_of(node.func) in ("getattr", "setattr", "hasattr", "delattr", "attrgetter"):
        named = next((one.value for one in node.args if isinstance(one, ast.Constant)), None)
        return named if isinstance(named, str) else None
    return None


@pytest.mark.parametrize(
    "source",
    [
        "torch._int_mm(a, b)",
        "from torch import _dynamo",
        "import torch._inductor.config as config",
        "def f():\n    from torch.utils import _pytree as pytree",
        "sys.modules.get('torch._dynamo.utils')",
        "torch.ops.aten._unsafe_view.default",
    ],
)
def test_the_rule_sees_a_private_name(source: str) -> None:
    assert len(used(source)) == 1


def test_the_rule_sees_a_private_attribute() -> None:
    sources = ("loader._get_iterator", "getattr(loader, '_get_iterator', None)", "setattr(loader, '_get_iterator', 1)")
    for source in sources:
        assert "_get_iterator" in {_accessed(node) for node in ast.walk(ast.parse(source))}


# what is changed in torch


CHANGED_BY_HAND = {
    "levers/channels_last.py",  # two functions, for the length of one call
    "script/seeds.py",  # for the whole life of a trial's process
}


def test_torch_is_changed_through_replaced_alone() -> None:
    """Its public switches, below torch.backends, are not its functions."""
    found = {
        str(path.relative_to(PACKAGE))
        for path, node in outside()
        if path.name != "replaced.py" and (_is_set_on_torch(node) or _sets_a_function(node))
    }
    assert found == CHANGED_BY_HAND


def _is_set_on_torch(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
        return False
    place = ast.unparse(node)
    return place.startswith(("torch.", "functional.", "Tensor.", "nn.")) and not place.startswith("torch.backends.")


def _sets_a_function(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node).startswith(("setattr(torch", "setattr(module,"))


def entries() -> dict[str, str]:
    """Private names that the adapter looks up or imports -> its file."""
    found = {}
    for path in ADAPTER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found.update(dict.fromkeys(names_in(node), path.stem))
    return found


OF_CUDA_BUILDS = {"torch._C._cuda_clearCublasWorkspaces", "torch._C._cuda_hasPrimaryContext"}

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


@pytest.mark.parametrize("name", sorted(entries()))
def test_it_is_there(name: str) -> None:
    if name in OF_CUDA_BUILDS and not torch.backends.cuda.is_built():
        pytest.skip("torch was built without CUDA")
    lookup.required(name)


@pytest.mark.parametrize(("name", "taken"), TAKES.items())
def test_it_takes_what_we_give(name: str, taken: set[str]) -> None:
    assert name in entries()
    assert taken <= inspect.signature(lookup.required(name)).parameters.keys()


@pytest.mark.parametrize("module", [attributes, dispatch, loading, modules, tensors])
def test_nothing_is_missing(module: Any) -> None:
    lacking = {one.name for one in vars(module).values() if isinstance(one, lookup.Missing)}
    assert lacking <= (set() if torch.backends.cuda.is_built() else OF_CUDA_BUILDS)


def test_attributes_are_there() -> None:
    """Those that only objects have; the others are looked up."""
    layer = torch.nn.Linear(2, 2)
    assert getattr(layer, attributes.COMPILED_CALL) is None
    assert attributes.plain_call(layer)(torch.ones(1, 2)).shape == (1, 2)
    assert hasattr(torch.compile(layer), attributes.ORIGINAL_MODULE)
    assert hasattr(layer.state_dict(), attributes.LAYOUT_VERSIONS)
    assert hasattr(torch.Tensor, attributes.PICKLED)
    assert hasattr(torch.compiler, attributes.COMPILING_FLAG)
    assert attributes.name_in_schema(torch.ops.aten.mm.default) == "aten::mm"
    assert attributes.packet_of(torch.ops.aten.mm.default) is torch.ops.aten.mm
    assert attributes.name_in_schema(torch.ops.higher_order.cond) == "higher_order::cond"
    assert attributes.changed_arguments(torch.ops.aten.add_.Tensor) == (0,)
    assert attributes.changed_arguments(torch.ops.aten.mm.default) == ()
    assert all(hasattr(torch.autograd.profiler, name) for name in attributes.PROFILER_STARTS)
    node = torch.ones(2, requires_grad=True).sum().grad_fn
    assert 0 <= dispatch.node_number(node) < dispatch.next_node_number()
    optimizer = torch.optim.SGD(layer.parameters(), foreach=False)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert hasattr(optimizer.step, attributes.STEP_IS_SCHEDULED)
    assert getattr(torch.optim.Adam(layer.parameters(), fused=True), attributes.TAKES_SCALE_IN_STEP)


def test_attributes_of_a_loader_are_there() -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=2)
    iterator = iter(loader)
    assert hasattr(loader, attributes.LOADER_ITERATOR)
    assert loading.worker_info(loading.worker) is None
    assert (loading.yielded_by(iterator), loading.batch_sampler_of(iterator)) == (0, loader.batch_sampler)
    assert next(loading.order_of(iterator)) == [0, 1]
    assert loading.next_data(iterator).tolist() == [3]
    assert hasattr(loading.SingleProcessIterator, loading.NEXT_INDEX)
    assert loading.BaseIterator.__next__.__code__.co_names == loading.NAMES_IN_NEXT


# where torch lacks a name


def test_a_missing_name_names_itself_and_the_version() -> None:
    lacking = lookup.private("torch._C._no_such_name")
    told = re.escape(f"torch {torch.__version__} has no torch._C._no_such_name; ")
    for use in (
        lambda: lacking(1),
        lambda: lacking.part,
        lambda: isinstance(1, lacking),
        lambda: isinstance(1, (str, lacking)),
        lambda: issubclass(int, lacking),
        lambda: lookup.require(len, lacking),
        lambda: lookup.required("torch._C._no_such_name"),
    ):
        with pytest.raises(MachineError, match=told):
            use()
    assert lookup.is_missing(lacking)
    assert not lookup.is_missing(lookup.private("torch._int_mm"))


def test_a_missing_attribute_names_its_class() -> None:
    with pytest.raises(MachineError, match=r"has no torch\.UntypedStorage\._no_such_name"):
        lookup.attribute("torch.UntypedStorage", "_no_such_name")(torch.ones(1).untyped_storage())
    assert lookup.is_missing(lookup.attribute("torch._no_such_class", "_any"))


def test_a_missing_import_names_the_version() -> None:
    with pytest.raises(MachineError, match=re.escape(f"torch {torch.__version__} has changed a private API")):  # noqa: SIM117
        with lookup.imported_from_torch():
            from torch._C import _no_such_name  # type: ignore[attr-defined]  # noqa: F401


def test_a_module_of_torchs_that_fails_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks inside torch's own module must be seen, and not be taken for a name that is not there."""

    def broken(name: str) -> Any:
        raise ImportError("libgomp.so.1: cannot open shared object file", name="libgomp")

    monkeypatch.setattr(importlib, "import_module", lambda name: torch if name == "torch" else broken(name))
    with pytest.raises(ImportError, match="libgomp"):
        lookup.private("torch._no_such_module.part")


# what importing takes


BY_IMPORT = """
import importlib, os, sys
for before, name in CASES:
    if before:
        import torch  # once, for the processes that are forked from here on
    if os.fork() == 0:
        break
    os.wait()
else:
    sys.exit()
exec(before)
known = {name for name in sys.modules if name.startswith("torch")}
importlib.import_module(name)
new = {".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("torch")} - known
print(before, name, sorted(new & {"torch", "torch._dynamo", "torch._inductor", "torch._functorch"}), sep="|")
"""
IMPORTS = [
    ("", "flatout"),
    ("", "flatout.torch_private"),
    ("", "flatout.torch_private.attributes"),
    ("", "flatout.torch_private.compiler"),
    ("", "flatout.torch_private.late"),
    ("import torch", "flatout.torch_private.dispatch"),
    ("import torch", "flatout.torch_private.tensors"),
    ("import torch", "flatout.torch_private.modules"),
    ("import torch.utils.data", "flatout.torch_private.loading"),
    ("import torch.distributed", "flatout.torch_private.ranks"),
    ("import torch._subclasses.fake_tensor", "flatout.torch_private.fake_tensors"),
]


@pytest.fixture(scope="module")
def imported() -> list[str]:
    source = f"CASES = {IMPORTS!r}\n{BY_IMPORT}"
    run = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, check=True)
    return run.stdout.splitlines()


@pytest.mark.parametrize(("before", "name"), IMPORTS)
def test_importing_it_imports_no_compiler(before: str, name: str, imported: list[str]) -> None:
    assert f"{before}|{name}|[]" in imported


# which version runs


def test_versions_are_tried_in_order_until_the_last_context_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[bool] = []
    monkeypatch.setattr(torch._C._dynamo.eval_frame, "_set_lru_cache", set_to.append)
    with compiler.versions_tried_in_order():
        with compiler.versions_tried_in_order():
            pass
        assert True not in set_to  # a compiled copy was closed; the outer one still runs
    assert set_to[-1] is True


@pytest.mark.slow
def test_breaks_in_a_loop_leave_a_function_uncompiled_and_have_their_line(python: Python, tmp_path: Path) -> None:
    """In a process of its own: what the compiler has seen stays."""
    (tmp_path / "breaks.py").write_text(
        "import logging, torch\n"
        "logging.disable(logging.WARNING)\n"
        "def scaled(x):\n"
        "    for _ in range(2):\n"
        "        x = x / x.abs().max().item()\n"
        "    return x\n"
        "torch.compile(scaled, backend='eager')(torch.ones(3))\n"
        "from flatout.torch_private.compiler import graph_breaks\n"
        "print(graph_breaks())\n"
    )
    done = python("breaks.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(so scaled is not compiled at all)" in done.stdout
    assert "breaks.py', 5)" in done.stdout
