"""What can be wrong with a model before it is trained: from its modules and their source, without a run.

check_facts(Facts(model=read_model(net)), CHECKS)    # findings, in the order of the list
"""

from __future__ import annotations

from collections.abc import Iterable

from flatout.diagnose.check import Check, Seen, check, where
from flatout.diagnose.facts import Facts
from flatout.script.behaviour_seen import SourceLine

LEAST_CONVOLUTIONS = 3
MOST_NAMED = 3


@check(
    means="Modules or parameters are in a plain list, tuple or dict: optimizer, .to(device) and state_dict miss them.",
    needs="an attribute of a module of yours is a Python container with trainable parameters that no module has "
    "registered; a container with a single entry, which is also a way to hide one on purpose, is a note",
    if_wrong="modules that were kept out on purpose, such as a teacher, are trained and saved with the model",
)
def unregistered_modules(facts: Facts) -> Seen | None:
    found = facts.model.unregistered if facts.model is not None else ()
    if not found:
        return None
    first, count = found[0], sum(one.parameters for one in found)
    alone = all(len(one.holds) == 1 for one in found)
    lists = {"dict": ("ModuleDict", "ParameterDict")}.get(first.container, ("ModuleList", "ParameterList"))
    return Seen(
        title=f"{_named([one.path for one in found])}: model.parameters() misses {count:,} trainable parameters",
        evidence=f"{first.path} is a plain {first.container} of {_named(first.holds)}, so the optimizer, .to(device), "
        "train() and state_dict() do not reach what is in it",
        remedy=f"keep it in nn.{lists['Parameter' in first.holds]}",
        fault=not alone,
        certain=not alone,
        lines=where(_lines(found)),
    )


@check(
    means="A tensor is a plain attribute of a module: .to(device) and state_dict() miss it.",
    needs="__init__ of a module of yours, and no other method, assigns a tensor with at least one dimension, which "
    "another method uses without moving it",
    if_wrong="nothing changes but that the tensor moves with the model",
)
def unregistered_tensors(facts: Facts) -> Seen | None:
    found = facts.model.tensors if facts.model is not None else ()
    if not found:
        return None
    trained = [one for one in found if one.trained]
    named = trained or list(found)  # what is never trained first; the others are found again once that is right
    first, name = named[0], named[0].path.rpartition(".")[2]
    shape = ", ".join(map(str, first.shape))
    one = len(named) == 1
    what = "does not move with the model and is" if one else "do not move with the model and are"
    missed = f"{what} not in its state_dict"
    return Seen(
        title=f"{_named([each.path for each in named])}: " + ("not in model.parameters()" if trained else missed),
        evidence=f"{first.path} is a plain tensor of shape [{shape}]"
        + (" with requires_grad=True, which no optimizer of model.parameters() trains" if trained else ""),
        remedy=f"self.{name} = nn.Parameter(...)"
        if trained
        else f'self.register_buffer("{name}", ..., persistent=False), or without persistent=False to save it',
        fault=True,
        certain=bool(trained),
        lines=where(_lines(named)),
    )


@check(
    means="Two linear layers follow each other without an activation: together they compute what one does.",
    needs="two trainable nn.Linear are neighbours in an nn.Sequential that is called as a whole, and the width between "
    "them is not less than those of input and output, as it is in a low-rank product",
    if_wrong="an activation changes what the model computes; two layers learn at another pace than one",
)
def linear_after_linear(facts: Facts) -> Seen | None:
    found = facts.model.linear_pairs if facts.model is not None else ()
    if not found:
        return None
    inputs, between, outputs = found[0].sizes
    return Seen(
        title=f"{_named([f'{one.first} and {one.second}' for one in found])} are one linear map: no activation between",
        evidence=f"Linear({inputs}, {between}) and Linear({between}, {outputs}) represent no more than "
        f"Linear({inputs}, {outputs}) does",
        remedy=f"put an activation such as nn.ReLU() between them, or use Linear({inputs}, {outputs})",
        fault=True,
        lines=where(_lines(found)),
        cost_bytes=sum(one.saved_bytes for one in found) or None,
    )


@check(
    means="All weights are float16: an optimizer that updates them loses updates smaller than their rounding.",
    needs="every parameter is float16, some are trainable, and the model is in training mode",
    if_wrong="fp32 weights take twice the memory; an inference-only model does not need them",
)
def half_model(facts: Facts) -> Seen | None:
    model = facts.model
    if model is None or not model.training or not model.trainable or set(model.bytes_by_dtype) != {"float16"}:
        return None
    return Seen(
        title="all parameters are float16, without fp32 copies for the optimizer",
        evidence=f"{model.trainable:,} trainable parameters, and the model is in training mode",
        remedy="for training keep the weights in fp32 and use autocast: model.float(), torch.autocast(...); for "
        "inference call model.eval()",
        fault=True,
        certain=False,
        unknown="it costs accuracy, not time",
    )


@check(
    means="A layer has a bias, and the batch norm after it subtracts it again.",
    needs="a Linear or convolution with a trainable bias stands directly before a batch norm in training mode, in an "
    "nn.Sequential that is called as a whole",
    if_wrong="with the batch norm in eval mode during training, the bias had an effect",
)
def bias_before_norm(facts: Facts) -> Seen | None:
    found = facts.model.needless_biases if facts.model is not None else ()
    if not found:
        return None
    numbers = sum(size for one in found for size in one.sizes)
    return Seen(
        title=f"{_named([one.first for one in found])}: a bias without effect before batch norm",
        evidence=f"{found[0].second} subtracts the batch's mean, and with it the bias of {found[0].first}; "
        f"{numbers:,} parameters in all",
        remedy="bias=False in the layer before the batch norm",
        lines=where(_lines(found)),
        cost_bytes=sum(one.saved_bytes for one in found),
    )


@check(
    means="The model ends in a softmax, which torch's cross_entropy computes itself.",
    needs="the outermost module is an nn.Sequential that ends in Softmax or LogSoftmax, or its forward returns what "
    "such a layer or a function softmax gives",
    if_wrong="a loss that takes probabilities needs the softmax, as nll_loss needs LogSoftmax",
)
def softmax_at_end(facts: Facts) -> Seen | None:
    last = facts.model.last if facts.model is not None else None
    if last is None:
        return None
    twice = "a second softmax weakens the gradients" if last.kind != "LogSoftmax" else "LogSoftmax would run twice"
    return Seen(
        title=f"{last.path}: the model ends in {last.kind}; cross_entropy expects scores",
        evidence=f"F.cross_entropy and nn.CrossEntropyLoss apply log_softmax themselves: {twice}",
        remedy=f"with cross_entropy, leave {last.kind} out of the model and apply it where probabilities are needed"
        + ("; with nll_loss it is right" if last.kind == "LogSoftmax" else ""),
        certain=False,
        lines=where(last.line),
    )


@check(
    means="A module of the model computes a layer that torch.nn has.",
    needs="its forward is recognised in the source of a class that the model uses",
    if_wrong="results differ by rounding; names of weights in checkpoints may change",
)
def layer_written_by_hand(facts: Facts) -> Seen | None:
    found = facts.model.by_hand if facts.model is not None else ()
    if not found:
        return None
    return Seen(
        title=_named([f"{one.name} is torch.nn.{one.torchs} written by hand" for one in found]),
        evidence="torch's layer is one operator where this is several",
        remedy=f"torch.nn.{found[0].torchs}",
        certain=False,
        lines=where([one.line for one in found]),
        unknown="the model was not run",
    )


@check(
    means="The model has several 2-d convolutions, which may be faster in channels_last.",
    needs=f"at least {LEAST_CONVOLUTIONS} of them have kernels larger than 1x1 and several input channels, and none of "
    "their weights is in channels_last",
    if_wrong="where channels_last is not faster, the measurement says so and nothing changes",
)
def channels_last_unmeasured(facts: Facts) -> Seen | None:
    model = facts.model
    if model is None or model.convolutions < LEAST_CONVOLUTIONS or model.channels_last:
        return None
    return Seen(
        title=f"{model.convolutions} convolutions in the default memory format: measure channels_last",
        evidence="whether it is faster depends on the machine and the sizes",
        remedy="flatout tune with your training script measures it; by hand: model.to(memory_format="
        "torch.channels_last), and the same for the inputs",
        unknown="the model was not run",
        plan={"memory_format": "channels_last"},
    )


# What makes the result wrong first, as in the list of scripts; then what costs something; then what may.
CHECKS: tuple[Check, ...] = (
    unregistered_modules,
    unregistered_tensors,
    linear_after_linear,
    half_model,
    bias_before_norm,
    softmax_at_end,
    layer_written_by_hand,
    channels_last_unmeasured,
)


def _named(names: Iterable[str]) -> str:
    """A few of them: 'a, b, c and 4 more'."""
    each = list(names)
    more = f" and {len(each) - MOST_NAMED} more" if len(each) > MOST_NAMED else ""
    return ", ".join(each[:MOST_NAMED]) + more


def _lines(found: Iterable[object]) -> list[SourceLine]:
    lines = [getattr(one, "line", None) for one in found]
    return [one for one in lines if one is not None]
