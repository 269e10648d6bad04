"""A compiled model with a bound on recompilations.

torch compiles a version for each new shape, and each takes seconds to minutes. Here shapes are made few (lengths in
buckets, batches filled up), the versions are counted, and past a bound the model goes on uncompiled. On the CPU the
weights are frozen into the code: convolutions and products then hold them in oneDNN's layout and take the batch norm,
the activation and the sum behind them along.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

from flatout.levers.compile import compile_in_place, repeated_blocks
from flatout.levers.first_compilation import compiler_is_there, headers_precompiled_meanwhile, in_our_cache
from flatout.levers.model_call import set_call
from flatout.replaced import settings_changed
from flatout.torch_private.compiler import dynamo_settings, is_compile_error, options_of_mode, versions_compiled

MOST_VERSIONS = 12
"""Of the whole model, graph breaks included: about as many as there are buckets up to 512 tokens."""


class CompiledModel:
    """Calls the model compiled in this mode ("default", "regional", ...) until it has too many versions."""

    def __init__(self, model: nn.Module, mode: str, *, device: str) -> None:
        self.model, self.mode = model, mode
        self.versions = 0
        self.gave_up: str | None = None
        self._call: Callable[..., object] = model
        self._targets = repeated_blocks(model) if mode == "regional" else []
        self._most = MOST_VERSIONS * (1 if mode != "regional" else 4)
        self._on_cpu = device == "cpu"
        self._known: set[object] = set()
        """Shapes that were called before."""
        options: dict[str, str | int | bool | Callable[..., object]] = {}
        if self._on_cpu:
            options = {"freezing": True}
            if not compiler_is_there():
                self._give_up("no C++ compiler is installed (torch.compile on the CPU needs one; install g++)")
                return
        with warnings.catch_warnings(action="ignore"):  # the compiler's advice, and deprecations inside torch
            if mode in ("reduce-overhead", "max-autotune"):
                options |= options_of_mode(mode)
            if mode == "regional":
                for target in self._targets:
                    compile_in_place(target, dynamic=False, options=options or None)
            else:  # not model.compile(): that leaves modules of torch's own, as nn.Sequential, uncompiled
                self._call = torch.compile(model, dynamic=False, options=options or None)

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.gave_up is not None:
            return self.model(*args, **kwargs)
        before, settings = versions_compiled(), dynamo_settings()
        # Our own bound counts, not torch's lower one, past which a function would silently run untraced.
        limit = max(settings.recompile_limit, self._most + 1)
        try:
            with (
                settings_changed(settings, recompile_limit=limit),
                warnings.catch_warnings(action="ignore"),
                self._building_quickly(args, kwargs),
            ):
                output = self._call(*args, **kwargs)
        except Exception as error:
            if not is_compile_error(error):
                raise
            self._give_up(f"compiling failed: {type(error).__name__}")
            return self.model(*args, **kwargs)
        self.versions += versions_compiled() - before
        if self.versions > self._most:
            self._give_up(f"{self.versions} versions were compiled (the bound is {self._most})")
        return output

    @contextlib.contextmanager
    def _building_quickly(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[None]:
        """Where inputs have new shapes, for which the CPU's kernels will be built."""
        inputs = (*args, *kwargs.values())
        shapes = tuple((one.shape, one.dtype) if isinstance(one, torch.Tensor) else type(one) for one in inputs)
        if not self._on_cpu or shapes in self._known:
            yield
            return
        with in_our_cache(), headers_precompiled_meanwhile() as precompile:
            precompile()
            yield
        self._known.add(shapes)

    def _give_up(self, reason: str) -> None:
        self.gave_up = f"went on without torch.compile: {reason}"
        for target in self._targets:
            set_call(target, None)
