"""Levers that compute the same, in another way: each must be accepted at what it claims.

`RIGHT` holds (name, claim, how, a script on which it does something). Those of the catalogue are named as they are
there; the others are rewrites of single operations, as a compiler or a kernel library would make them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.proof.planted import Context, Planted, before_step, on_modules, replaced
from flatout.levers.catalogue import LEVERS as CATALOGUE
from flatout.levers.subject import Subject
from flatout.plan_choices import Exactness

FUNCTIONAL = "torch.nn.functional"


def nothing() -> Context:
    return lambda subject: contextlib.nullcontext()


# linear layers


def linear(compute: Callable[[Any, Any], Any]) -> Context:
    """`compute(x, weight)` in place of the product of every linear layer; the bias is added after it."""

    def make(original: Any) -> Any:
        def changed(x: Any, weight: Any, bias: Any = None) -> Any:
            out = compute(x, weight)
            return out if bias is None else out + bias

        return changed

    return replaced(FUNCTIONAL, "linear", make)


def in_halves(x: Any, weight: Any) -> Any:
    half = weight.shape[1] // 2
    return x[..., :half] @ weight[:, :half].t() + x[..., half:] @ weight[:, half:].t()


def in_fp64(x: Any, weight: Any) -> Any:
    return (x.double() @ weight.double().t()).to(x.dtype)


def by_einsum(x: Any, weight: Any) -> Any:
    import torch

    return torch.einsum("...i,oi->...o", x, weight)


def row_by_row(x: Any, weight: Any) -> Any:
    import torch

    rows = x.reshape(-1, x.shape[-1])
    halves = [part @ weight.t() for part in rows.chunk(2)]
    return torch.cat(halves).reshape(*x.shape[:-1], -1)


def backwards_order(x: Any, weight: Any) -> Any:
    return x.flip(-1) @ weight.flip(-1).t()


def in_format(dtype: str) -> Callable[[Any, Any], Any]:
    def compute(x: Any, weight: Any) -> Any:
        import torch

        narrow = getattr(torch, dtype)
        return (x.to(narrow) @ weight.to(narrow).t()).to(x.dtype)

    return compute


def tf32(x: Any, weight: Any) -> Any:
    return _rounded(x) @ _rounded(weight).t()


def _rounded(tensor: Any) -> Any:
    """To 11 bits of mantissa, the gradient as if nothing had happened."""
    import torch

    mantissa, exponent = torch.frexp(tensor.detach())
    return tensor + (torch.ldexp((mantissa * 2048).round() / 2048, exponent) - tensor).detach()


# other operations


def function(name: str, compute: Callable[..., Any], place: str = FUNCTIONAL) -> Context:
    return replaced(place, name, lambda original: lambda *args, **kwargs: compute(original, *args, **kwargs))


def loss_in_fp64(original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    return original(logits.double(), *args, **kwargs).float()


def loss_by_logsumexp(original: Any, logits: Any, targets: Any, **kwargs: Any) -> Any:
    return (logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).mean()


def gelu_by_erf(original: Any, x: Any, approximate: str = "none") -> Any:
    return x * 0.5 * (1 + (x * 0.7071067811865476).erf())


def norm_by_hand(original: Any, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight + bias


def relu_by_maximum(original: Any, x: Any, inplace: bool = False) -> Any:
    return x.clamp(min=0)


def conv_by_unfold(original: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, *rest: Any) -> Any:
    import torch

    columns = torch.nn.functional.unfold(x, weight.shape[2:], padding=padding, stride=stride)
    out = (weight.flatten(1) @ columns).view(x.shape[0], weight.shape[0], *x.shape[2:])
    return out if bias is None else out + bias.view(1, -1, 1, 1)


def conv_in_bf16(original: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    out = original(x.bfloat16(), weight.bfloat16(), None, *rest).float()
    return out if bias is None else out + bias.view(1, -1, 1, 1)


def conv_in_fp64(original: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    return original(x.double(), weight.double(), None if bias is None else bias.double(), *rest).float()


# backends and memory


@contextlib.contextmanager
def without_onednn(subject: Subject) -> Iterator[None]:
    import torch

    with torch.backends.mkldnn.flags(enabled=False):
        yield


@contextlib.contextmanager
def without_collector(subject: Subject) -> Iterator[None]:
    import gc

    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def deterministic(subject: Subject) -> Iterator[None]:
    import torch

    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def saved(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Context:
    """What the forward pass keeps for the backward pass, kept in another way."""

    @contextlib.contextmanager
    def context(subject: Subject) -> Iterator[None]:
        import torch

        def wrapper(module: Any, call: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return call()

        with subject.around_calls(wrapper):
            yield

    return context


def in_16_bits(tensor: Any) -> Any:
    import torch

    whole = tensor.dtype is torch.float32 and tensor.dim() > 1 and not tensor.requires_grad
    return (tensor.bfloat16(), tensor.dtype) if whole else (tensor, tensor.dtype)


def copied_outputs() -> Context:
    def visit(model: Any) -> Callable[[], None]:
        return model.register_forward_hook(lambda module, args, out: out.clone()).remove  # type: ignore[no-any-return]

    return on_modules(visit)


def copied_gradients() -> Context:
    def act(step: Any) -> None:
        for parameter in step.parameters:
            parameter.grad = parameter.grad.clone()

    return before_step(act)


def padded_copies(original: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """The product of padded copies: the same numbers at other addresses, beside zeros."""
    import torch

    pad = torch.nn.functional.pad
    out = original(pad(x, (0, 3)), pad(weight, (0, 3)), bias)
    return out


def seeded_aside(subject: Subject) -> contextlib.AbstractContextManager[None]:
    """Draws from a generator of its own, which is nobody else's business."""

    def draw(step: Any) -> None:
        import torch

        torch.rand(3, generator=torch.Generator().manual_seed(step.number))

    return before_step(draw)(subject)


PLANTED: tuple[tuple[str, Exactness, Context, str], ...] = (
    ("nothing at all", "bit-identical", nothing(), "mlp_epochs"),
    ("no garbage collection", "bit-identical", without_collector, "gpt_accumulated"),
    ("outputs copied", "bit-identical", copied_outputs(), "two_optimizers"),
    ("gradients copied", "bit-identical", copied_gradients(), "cnn_schedule"),
    ("saved tensors copied", "bit-identical", saved(lambda t: t.clone(), lambda t: t), "lstm_text"),
    ("random numbers of a generator of its own", "bit-identical", seeded_aside, "mlp_epochs"),
    ("linear in halves", "rounding", linear(in_halves), "mlp_epochs"),
    ("linear in fp64", "rounding", linear(in_fp64), "numpy_batches"),
    ("linear by einsum", "rounding", linear(by_einsum), "gpt_accumulated"),
    ("linear by parts of the batch", "rounding", linear(row_by_row), "short"),
    ("linear from the last input to the first", "rounding", linear(backwards_order), "two_optimizers"),
    ("linear beside zeros", "rounding", function("linear", padded_copies), "lstm_text"),
    ("cross-entropy in fp64", "rounding", function("cross_entropy", loss_in_fp64), "lstm_text"),
    ("cross-entropy by logsumexp", "rounding", function("cross_entropy", loss_by_logsumexp), "mlp_epochs"),
    ("GELU by erf", "rounding", function("gelu", gelu_by_erf), "gpt_accumulated"),
    ("layer norm by hand", "rounding", function("layer_norm", norm_by_hand), "gpt_accumulated"),
    ("ReLU by clamp", "rounding", function("relu", relu_by_maximum), "two_optimizers"),
    ("convolution by unfold", "rounding", function("conv2d", conv_by_unfold), "cnn_schedule"),
    ("convolution in fp64", "rounding", function("conv2d", conv_in_fp64), "cnn_schedule"),
    ("without oneDNN", "rounding", without_onednn, "cnn_schedule"),
    ("deterministic algorithms", "rounding", deterministic, "cnn_schedule"),
    ("linear in bf16", "reduced", linear(in_format("bfloat16")), "mlp_epochs"),
    ("linear of a transformer in bf16", "reduced", linear(in_format("bfloat16")), "gpt_accumulated"),
    ("linear in fp16", "reduced", linear(in_format("float16")), "numpy_batches"),
    ("linear in TF32", "reduced", linear(tf32), "two_optimizers"),
    ("convolution in bf16", "reduced", function("conv2d", conv_in_bf16), "cnn_schedule"),
    ("linear in bf16 beside updates by hand", "reduced", linear(in_format("bfloat16")), "own_updates"),
    ("linear by einsum beside updates by hand", "rounding", linear(by_einsum), "own_updates"),
    ("linear in bf16 beside a state that is carried", "reduced", linear(in_format("bfloat16")), "carried_state"),
    ("activations kept in bf16", "reduced", saved(in_16_bits, lambda p: p[0].to(p[1])), "numpy_batches"),
)

OF_THE_CATALOGUE: tuple[tuple[str, Any, str], ...] = (
    ("malloc retains memory", "retain", "mlp_epochs"),
    ("flush denormals", True, "numpy_batches"),
    ("threads", 1, "cnn_schedule"),
    ("threads", 2, "gpt_accumulated"),
    ("optimizer", "fused", "mlp_epochs"),
    ("optimizer", "fused", "cnn_schedule"),
    ("optimizer", "foreach", "numpy_batches"),
    ("optimizer", "foreach", "short"),
    ("channels_last", "channels_last", "cnn_schedule"),
    ("fused attention", "fused", "gpt_accumulated"),
    ("autocast", "bf16", "numpy_batches"),
    ("autocast", "bf16", "lstm_text"),
    ("autocast", "bf16", "two_optimizers"),
    ("autocast", "bf16", "own_updates"),
    ("autocast", "bf16", "carried_state"),
    ("matmul precision", "medium", "mlp_epochs"),
    ("batched fetch", "batched", "two_optimizers"),
    ("batched fetch", "batched", "mlp_epochs"),
    ("batched fetch", "batched", "own_updates"),
    ("torch.compile", "default", "numpy_batches"),
)

LEVERS = (*(Planted(name, claim, act) for name, claim, act, _ in PLANTED), *CATALOGUE)
RIGHT: tuple[tuple[str, Any, str], ...] = (
    *((name, True, script) for name, _, _, script in PLANTED),
    *OF_THE_CATALOGUE,
)
