"""Python runs this at the start of the processes that a script under `flatout run` starts.

It must cost next to nothing, because most of these processes train nothing: it imports nothing, waits for torch, and
then for the first optimizer to be made. The user's own `sitecustomize` is loaded in its place, and the folder of this
one leaves `sys.path`.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

FOLDER = os.path.dirname(os.path.abspath(__file__))
FOLLOWING = "flatout.script.following"
"""What watches a process; by name, because in the script's own process it imports this module."""
PACKAGE = os.path.dirname(os.path.dirname(FOLDER))


class TorchWatch:
    """A finder that calls `when_first_optimizer` once torch has been imported."""

    def __init__(self, path: list[str]) -> None:
        self.path = path
        self._searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch" or self._searching:
            return None
        self._searching = True  # the search below calls us again
        try:
            from importlib.util import find_spec

            spec = find_spec(name)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        loader, original = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                when_first_optimizer(self.follow)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def follow(self) -> None:
        """Watch this process, if this is the Flatout that it would import itself. Raises nothing."""
        if "flatout.script" in sys.modules:  # `flatout run` or a trial in this very process: it watches already
            return
        from importlib import import_module
        from importlib.util import find_spec

        path = list(sys.path)
        sys.path[:] = self.path  # without the script's folder, whose modules may have the names of ours
        try:
            found = find_spec("flatout")
            if found is None or found.origin is None or os.path.dirname(os.path.abspath(found.origin)) != PACKAGE:
                return
            import_module("flatout.script.own_modules").adopt(self.path)
        except Exception:
            return
        finally:
            sys.path[:] = path
        import_module(FOLLOWING).follow()


def when_first_optimizer(call: Callable[[], None]) -> None:
    """Call this once, before the next optimizer of this process is made. torch must have been imported."""
    optimizers = sys.modules.get("torch.optim.optimizer")
    if optimizers is None:
        return
    kind = optimizers.Optimizer
    original = kind.__init__
    waiting = [call]

    def __init__(self: object, *args: object, **kwargs: object) -> None:
        if kind.__init__ is __init__:
            kind.__init__ = original
        try:
            if waiting:
                waiting.pop()()
        except Exception:
            pass
        try:
            original(self, *args, **kwargs)
        except BaseException as error:  # a traceback shows no frame of ours
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise

    from functools import update_wrapper

    update_wrapper(__init__, original)
    kind.__init__ = __init__


def _load_the_users_own() -> None:
    """Raises the ImportError that Python expects where there is none: no `sitecustomize` is loaded then."""
    # `abspath` would ask for the current folder, which the script may have removed.
    sys.path[:] = [folder for folder in sys.path if os.path.normpath(folder) != FOLDER]
    sys.meta_path.insert(0, TorchWatch(list(sys.path)))
    del sys.modules["sitecustomize"]
    import sitecustomize  # noqa: F401


if __name__ == "sitecustomize":
    _load_the_users_own()
