"""What a run computed, in a form small enough to compare between processes.

Each step: the loss that was passed to backward, and the norm of the gradients. In the first steps also a sample of
gradient elements of every parameter: a norm does not move when a small error stands at right angles to the gradient, a
sample does. At the end: a digest of every weight, and a sample of the weights.
"""

from __future__ import annotations

import hashlib
from typing import Any

from flatout.levers.subject import Subject
from flatout.script.watch import Watch

ELEMENTS_PER_TENSOR = 64
ELEMENTS_IN_ALL = 20_000


class NumericsRecorder:
    """Records the steps between its creation and `finish`."""

    def __init__(self, watch: Watch, *, gradient_steps: int) -> None:
        self._watch, self._gradient_steps = watch, gradient_steps
        self._losses: list[list[Any]] = [[]]
        self._norms: list[Any] = []
        self._samples: list[list[Any]] = []
        self._step_norms: list[Any] = []
        self._step_samples: list[Any] = []
        watch.at_backward.append(self._backward)
        watch.before_optimizer.append(self._optimizer)

    @property
    def steps(self) -> int:
        return len(self._norms)

    def step_ended(self) -> None:
        if not self._step_norms:  # no optimizer: the gradients are still there when the pass ends
            self._take_gradients([p for module in self._watch.subject.modules for p in module.parameters()])
        self._norms.append(_total(self._step_norms))
        if len(self._samples) < self._gradient_steps:
            self._samples.append(self._step_samples)
        self._step_norms, self._step_samples = [], []
        self._losses.append([])

    def finish(self) -> dict[str, Any]:
        self._watch.at_backward.remove(self._backward)
        self._watch.before_optimizer.remove(self._optimizer)
        tensors = weights(self._watch.subject)
        return {
            "losses": [_mean(losses) for losses in self._losses[: self.steps]],
            "gradient_norms": [float(norm) if norm is not None else None for norm in self._norms],
            "gradient_samples": [[_floats(sample) for sample in step] for step in self._samples],
            "weight_digest": _digest(tensors),
            "weight_sample": [value for tensor in tensors for value in _floats(_sample(tensor, len(tensors)))],
        }

    def _backward(self, roots: tuple[Any, ...]) -> None:
        self._losses[-1] += [root.detach().float().mean() for root in roots if hasattr(root, "detach")]

    def _optimizer(self, optimizer: Any) -> None:
        self._take_gradients([p for group in optimizer.param_groups for p in group["params"]])

    def _take_gradients(self, parameters: list[Any]) -> None:
        import torch

        gradients = [p.grad.detach() for p in parameters if p.grad is not None]
        gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        if not gradients:
            return
        norms = torch._foreach_norm([g.float() for g in gradients])
        self._step_norms.append(torch.stack([norm.cpu() for norm in norms]).norm())
        if len(self._samples) < self._gradient_steps:
            self._step_samples += [_sample(g, len(gradients)).clone() for g in gradients]


def nudge_weights(subject: Subject) -> None:
    """Move every weight by about one rounding error of its format, up or down: what the script makes of that is its
    own floor."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in weights(subject):
            if tensor.is_floating_point():
                signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8) * 2 - 1
                ulp = torch.finfo(tensor.dtype).eps  # one unit in the last place of a number near 1
                tensor.mul_(1 + ulp * signs.to(device=tensor.device, dtype=tensor.dtype))


def weights(subject: Subject) -> list[Any]:
    """The parameters of all models and optimizers, each once."""
    found: dict[int, Any] = {}
    for module in subject.modules:
        found |= {id(p): p for p in module.parameters()}
    for optimizer in subject.optimizers:
        found |= {id(p): p for group in optimizer.param_groups for p in group["params"]}
    return [tensor.detach() for tensor in found.values()]


def _sample(tensor: Any, tensors: int) -> Any:
    """Evenly spaced elements in logical order, whatever the memory format."""
    count = max(1, min(ELEMENTS_PER_TENSOR, ELEMENTS_IN_ALL // max(1, tensors)))
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // count)][:count]


def _floats(tensor: Any) -> list[float]:
    return [float(value) for value in tensor.float().cpu().tolist()]


def _total(norms: list[Any]) -> Any:
    import torch

    return torch.stack(norms).norm() if norms else None


def _mean(losses: list[Any]) -> float | None:
    return sum(float(loss) for loss in losses) / len(losses) if losses else None


def _digest(tensors: list[Any]) -> str:
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.contiguous().reshape(-1).cpu()
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()
