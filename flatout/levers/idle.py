"""A lever that found nothing to act on says so after the first step.

What a lever acts on is not always known from the model's layers: a forward may call `functional.conv2d`, and some
kernels are used for large tensors alone. So those levers note what they act on, and the first update looks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flatout.levers.subject import Subject
from flatout.torch_private.attributes import COMPILED_CALL


class Acts:
    """Has a lever acted? For code that runs in every call: `if not acts.any: acts.note()`."""

    def __init__(self) -> None:
        self.any = False

    def note(self) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self.any = True


@contextlib.contextmanager
def said_if_idle(subject: Subject, lever: str, acts: Acts, why: str) -> Iterator[None]:
    """Note `why` if the lever has not acted before the first update, where all models are known, as in TrainStep. In a
    script there may be others, and `applies` has looked at what trains. Compiled code shows nothing."""
    if subject.any_model:
        yield
        return
    looked = False

    def look() -> None:
        nonlocal looked
        if not looked and not acts.any and not _is_compiled(subject):
            subject.note_incident(lever, f"in the first step {why}")
        looked = True

    with subject.before_steps(look):
        yield


def _is_compiled(subject: Subject) -> bool:
    return any(getattr(one, COMPILED_CALL) is not None for module in subject.modules for one in module.modules())
