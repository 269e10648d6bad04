"""Any nested state comes back as it was, type for type; what cannot be stored is refused by name."""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.checkpoint.folder import Checkpoints
from flatout.checkpoint.storages import NATIVE
from flatout.checkpoint.structure import split
from flatout.errors import UsageError


def there_and_back(folder: Path, value: Any) -> Any:
    checkpoints = Checkpoints(folder, keep_last=1)
    checkpoints.save({"extra": value}, step=0)
    loaded = checkpoints.load()
    assert loaded is not None
    return loaded.state["extra"]


def same(a: Any, b: Any) -> bool:
    """Equal in type, value and bits; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""


tensors = st.builds(
    lambda shape, dtype, turned: (
        torch.arange(math.prod(shape)).reshape(shape).to(dtype).transpose(0, -1)
        if turned and shape
        else torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex128]),
    st.booleans(),
)
keys = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary(max_size=3)
leaves = (
    keys
    | st.floats()
    | st.complex_numbers(allow_nan=False)
    | tensors
    | st.sampled_from([np.float32(0.1), np.int64(-3), np.bool_(True), torch.float16, torch.Size([2, 0])])
)
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys | st.tuples(keys, keys), inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.frozensets(keys, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=nested)
def test_nested_values_come_back(tmp_path: Path, value: Any) -> None:
    assert same(there_and_back(tmp_path, value), value)


def content_of(tensor: torch.Tensor) -> list[int]:
    """Its bytes, whatever torch can do with the dtype."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage().tolist()[start : start + tensor.nbytes]  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [*NATIVE, torch.complex128, torch.float8_e4m3fnuz, torch.int4, torch.uint3], ids=str)
def test_tensors_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    content = torch.arange(96, dtype=torch.uint8)
    size = torch.empty(0, dtype=dtype).element_size()
    content = content.remainder(2) if dtype == torch.bool else content
    count = 96 // size
    tensor = torch.empty(0, dtype=dtype).set_(content.untyped_storage(), 0, (count,), (1,))
    one = torch.empty(0, dtype=dtype).set_(content.clone().untyped_storage(), 1, (), ())
    none = torch.empty(2, 0, 3, dtype=dtype)
    back = there_and_back(tmp_path, [tensor, one, none])
    for before, after in zip((tensor, one, none), back, strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert content_of(before) == content_of(after)


def test_nan_and_signed_zero_keep_their_bits(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -(2**31), 1], dtype=torch.int32)
    assert torch.equal(there_and_back(tmp_path, bits.view(torch.float32)).view(torch.int32), bits)


def test_layouts_come_back(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    holes, spread = torch.randn(6, 8)[::2, 1::3], torch.randn(3, 1).expand(3, 1000)
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    values = [image, holes, spread, conjugate, conjugate.imag, torch.randn(4, 1, 5).transpose(0, 2)]
    back = there_and_back(tmp_path, values)
    assert all(torch.equal(a, b) for a, b in zip(values, back, strict=True))
    assert back[0].is_contiguous(memory_format=torch.channels_last)
    assert back[2].stride() == (1, 0)
    assert back[5].stride() == values[5].stride()


def test_shared_memory_is_stored_once_and_comes_back_tied(tmp_path: Path) -> None:
    weight = torch.randn(1000, 10)
    back = there_and_back(tmp_path, {"a": weight, "b": weight.detach(), "c": weight.t(), "d": weight[5:7], "e": 1})
    assert back["a"] is back["b"]
    back["a"][6, 0] = 7.0
    assert back["c"][0, 6] == back["d"][1, 0] == 7.0
    (file,) = tmp_path.glob("*/state.safetensors")
    assert file.stat().st_size < weight.nbytes + 1000


def test_parts_of_one_storage_are_no_copies_of_it(tmp_path: Path) -> None:
    flat = torch.randn(100_000)
    back = there_and_back(tmp_path, [flat[:10], flat[50:60]])
    assert torch.equal(back[0], flat[:10])
    assert torch.equal(back[1], flat[50:60])
    (file,) = tmp_path.glob("*/state.safetensors")
    assert file.stat().st_size < 1000


def test_overlapping_looks_of_several_dtypes(tmp_path: Path) -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    values = [memory[20:28].view(torch.int32), memory[24:40].view(torch.float64), memory[21:23]]
    assert all(torch.equal(a, b) for a, b in zip(values, there_and_back(tmp_path, values), strict=True))


def test_names_that_collide_or_are_odd(tmp_path: Path) -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    value = {"a.b": one, "a": {"b": two}, "__metadata__": three, "": one + 1, "\ud800": two + 1, 0: one, "0": three}
    assert same(there_and_back(tmp_path, value), value)


def test_what_libraries_put_into_states(tmp_path: Path) -> None:
    value = [Counter({30: 1, 60: 2}), {1, 2}, 2**200, -(10**5000), torch.device("cuda:3"), np.arange(6).reshape(2, 3).T]
    value += [np.empty((0, 2)), np.datetime64("2024-01-01"), np.array("x")]
    back = there_and_back(tmp_path, value)
    assert same(back, value)


def test_model_file_is_readable_by_the_library(tmp_path: Path) -> None:
    state = {"layer.weight": torch.randn(3, 2, dtype=torch.float64), "layer.bias": torch.ones(3, dtype=torch.bfloat16)}
    Checkpoints(tmp_path).save({"model": state}, step=1)
    (file,) = tmp_path.glob("*/model.safetensors")
    read = safetensors.torch.load_file(file)
    assert set(read) == set(state)
    assert all(torch.equal(read[name], state[name]) for name in state)
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_parameter_comes_back_as_a_plain_tensor(tmp_path: Path) -> None:
    back = there_and_back(tmp_path, torch.nn.Parameter(torch.ones(2)))
    assert type(back) is torch.Tensor
    assert not back.requires_grad


class Loop(list[Any]):
    pass


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (lambda: 0, "is of type function"),
        (object(), "is of type object"),
        (Loop(), "Loop"),
        (deque([1]), "is of type collections.deque"),
        (torch.ones(2, 2).to_sparse(), "layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "meta device"),
        (torch.nn.Linear(1, 1), "Linear"),
        (np.array([object()]), "numpy's dtype object"),
    ],
    ids=["lambda", "object", "list of itself", "deque", "sparse", "meta", "module", "array of objects"],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path: Path, value: Any, told: str) -> None:
    state = {"optimizer": {"state": {0: [1, value]}}}
    with pytest.raises(UsageError) as caught:
        Checkpoints(tmp_path / "new").save(state, step=1)
    assert str(caught.value).startswith("state['optimizer']['state'][0][1] ")
    assert told in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_value_that_holds_itself_is_refused(tmp_path: Path) -> None:
    value: list[Any] = []
    value.append([value, value])
    with pytest.raises(UsageError, match="holds itself"):
        Checkpoints(tmp_path).save({"extra": value}, step=1)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    value = {"a": [torch.ones(2), {1: (2, torch.zeros(1))}]}
    before = copy.deepcopy(value)
    there_and_back(tmp_path, value)
    assert same(before, value)


@pytest.mark.parametrize("state", [[1], {1: 2}])
def test_a_state_is_a_dict_of_texts(tmp_path: Path, state: Any) -> None:
    with pytest.raises(UsageError, match="texts as keys"):
        Checkpoints(tmp_path).save(state, step=1)


def test_arrays_of_types_of_other_packages_are_refused() -> None:
    types = pytest.importorskip("ml_dtypes")
    with pytest.raises(UsageError, match="is of numpy's dtype bfloat16"):
        split({"extra": np.zeros(2, types.bfloat16)})
