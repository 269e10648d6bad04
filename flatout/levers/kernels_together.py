"""The CPU kernels of a compiled graph, built in one C++ file per thread of the compiler.

with compiled_together():
    ...                         # whatever compiles for the CPU

Inductor builds a file for each kernel. Most of the time goes into what every file repeats: the templates that the
precompiled headers leave to be instantiated, and linking. So the kernels of a graph share a few files, with the same
code, flags and cache; what does not build that way is built as inductor does it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from flatout.replaced import replaced
from flatout.torch_private.compiler import built_kernels, compile_threads, compiler_of_kernels, later_kernel

Kernel = Callable[..., object]

ONE_KERNEL = re.compile(
    r'\s*(#include\s*[<"][^>"\n]+[>"])\s*(extern\s+"C"\s+(?:__declspec\(dllexport\)\s+)?void\s+kernel\(.*)', re.S
)
"""Its header, and a source that begins with the one function: nothing before it could have the name of another's."""

MOST_IN_A_FILE = 32
"""Kernels: what a file repeats takes as long as four of them, and a compiler's memory grows with them."""

MODULE = "kernels"
BINDINGS = """
#include <Python.h>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace flatout {

void* (*tensor_data)(PyObject*) = nullptr;

template <typename T>
T argument(PyObject* value) {
  if constexpr (std::is_pointer_v<T>) {
    return static_cast<T>(tensor_data(value));
  } else if constexpr (std::is_floating_point_v<T>) {
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) throw std::runtime_error("a kernel takes a float here");
    return static_cast<T>(number);
  } else if constexpr (std::is_unsigned_v<T>) {
    void* const address = PyLong_AsVoidPtr(value);
    if (address == nullptr && PyErr_Occurred()) throw std::runtime_error("a kernel takes an address here");
    return reinterpret_cast<T>(address);
  } else {
    const Py_ssize_t number = PyLong_AsSsize_t(value);
    if (number == -1 && PyErr_Occurred()) throw std::runtime_error("a kernel takes an int here");
    return static_cast<T>(number);
  }
}

template <typename... A, std::size_t... I>
void pass(void (*kernel)(A...), PyObject* args, std::index_sequence<I...>) {
  kernel(argument<A>(PyTuple_GET_ITEM(args, I))...);
}

template <typename... A>
PyObject* call(void (*kernel)(A...), PyObject* args) {
  if (PyTuple_GET_SIZE(args) != sizeof...(A)) {
    return PyErr_Format(PyExc_RuntimeError, "a kernel takes %zu arguments", sizeof...(A));
  }
  try {
    pass(kernel, args, std::index_sequence_for<A...>{});
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "a kernel failed");
    return nullptr;
  }
  Py_RETURN_NONE;
}

}  // namespace flatout
"""
BINDING = "static PyObject* call_{name}(PyObject*, PyObject* args) {{ return flatout::call(&{name}, args); }}"
METHOD = '{{"{name}", call_{name}, METH_VARARGS, ""}},'
INITIALIZER = """
static PyMethodDef methods[] = {{ {methods} {{nullptr, nullptr, 0, nullptr}} }};
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{module}", nullptr, -1, methods}};

PyMODINIT_FUNC PyInit_{module}(void) {{
  const char* text = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
  errno = 0;
  const auto address = text ? std::strtoull(text, nullptr, 10) : 0;
  if (errno || !address) {{
    PyErr_SetString(PyExc_RuntimeError, "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR is not set");
    return nullptr;
  }}
  flatout::tensor_data = reinterpret_cast<decltype(flatout::tensor_data)>(static_cast<std::uintptr_t>(address));
  return PyModule_Create(&definition);
}}
"""


@contextlib.contextmanager
def compiled_together() -> Iterator[None]:
    """Imports the compiler."""
    with replaced(compiler_of_kernels(), "cpp_pybinding", _gathering):
        yield


def _gathering(separately: Callable[..., _Build]) -> Callable[..., object]:
    """Stands in for the function by which a compiled graph asks for one of its kernels; it waits for all of them
    later."""
    gathered: WeakKeyDictionary[object, _Batch] = WeakKeyDictionary()

    def kernel_of(graph: object, argtypes: Sequence[str], source: str) -> object:
        if compile_threads() < 2 or not ONE_KERNEL.fullmatch(source):
            return separately(graph, argtypes, source)
        batch = gathered.get(graph)
        if batch is None or batch.built is not None:
            batch = gathered[graph] = _Batch()
        return later_kernel(batch.add(source, lambda: separately(graph, argtypes, source)))

    return kernel_of


class _Build(Protocol):
    """One kernel, as inductor builds it."""

    def result(self) -> Kernel: ...


class _Batch:
    """Kernels that are asked for before the first of them is needed."""

    def __init__(self) -> None:
        self._sources: list[str] = []
        self._separately: list[Callable[[], _Build]] = []
        self.built: Sequence[Kernel] | None = None

    def add(self, source: str, separately: Callable[[], _Build]) -> Callable[[], Kernel]:
        """separately: begins to build it as inductor does."""
        place = len(self._sources)
        self._sources.append(source)
        self._separately.append(separately)
        return lambda: self._all()[place]

    def _all(self) -> Sequence[Kernel]:
        if self.built is None:
            self.built = self._together() if len(self._sources) > 1 else None
            self.built = self.built or [one.result() for one in [begin() for begin in self._separately]]
            self._sources, self._separately = [], []  # these hold the graph, which would hold its batch
        return self.built

    def _together(self) -> Sequence[Kernel] | None:
        """None where that fails: what is wrong with a kernel is reported where it is built alone."""
        parts = max(compile_threads(), math.ceil(len(self._sources) / MOST_IN_A_FILE))
        groups = shared_out([len(source) for source in self._sources], parts)
        try:
            loads = [built_kernels(one_source([self._sources[i] for i in group]), MODULE) for group in groups]
            found = {
                place: function
                for group, load in zip(groups, loads, strict=True)
                for place, function in zip(group, _functions(load(), len(group)), strict=True)
            }
        except Exception:
            return None
        return [found[place] for place in range(len(self._sources))]


def _functions(module: object, count: int) -> list[Kernel]:
    return [getattr(module, f"kernel_{number}") for number in range(count)]


def shared_out(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Their places in up to so many groups of about the same total size."""
    groups: list[list[int]] = [[] for _ in range(min(parts, len(sizes)))]
    totals = [0] * len(groups)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = totals.index(min(totals))
        groups[least].append(place)
        totals[least] += sizes[place]
    return groups


def one_source(sources: Sequence[str]) -> str:
    """C++ that defines all of them, as functions kernel_0, kernel_1, ... of a Python module."""
    headers, kernels = dict[str, None](), list[str]()
    for number, source in enumerate(sources):
        found = ONE_KERNEL.fullmatch(source)
        assert found is not None
        headers[found[1]] = None
        kernels.append(f"#define kernel kernel_{number}\n{found[2]}\n#undef kernel")
    names = [f"kernel_{number}" for number in range(len(sources))]
    bindings = [BINDING.format(name=name) for name in names]
    methods = " ".join(METHOD.format(name=name) for name in names)
    last = INITIALIZER.format(module=MODULE, methods=methods)
    return "\n".join([*headers, *kernels, BINDINGS, *bindings, last])
