"""How data is loaded: whole batches of data in memory, page-locked batches, copies that are not waited for."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.plan_choices import ChoiceValue
from flatout.source_patch import image_sets
from flatout.source_patch.edits import Changed, NoSourceForm, Replacement, with_keyword
from flatout.source_patch.setting_forms import Notes
from flatout.source_patch.source_file import SourceFile, called, dotted, keyword
from flatout.source_patch.sources import Sources, Value
from flatout.source_patch.training_step import TrainingStep, training_step
from flatout.source_patch.tuned_loop import TunedLoop

LOADERS = frozenset(("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"))
IN_MEMORY = frozenset(("torch.utils.data.TensorDataset", "torch.utils.data.dataset.TensorDataset"))
PARAMETERS = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
)
"""Of DataLoader, in their order."""
KEPT = ("pin_memory", "generator", "timeout", "pin_memory_device")
"""Keywords that mean the same for a loader of whole batches."""
AROUND = ("enumerate", "tqdm", "trange", "iter")
ASKED_OF_LOADERS = ("batch_size", "batch_sampler", "sampler", "drop_last")
"""Attributes that are others for a loader of whole batches."""
SETTINGS = (
    *("args", "arguments", "cfg", "conf", "config", "configuration", "flags", "hparams", "hyperparameters"),
    *("opt", "options", "opts", "params", "self", "settings"),
)
"""What has attributes of these names, and is no loader."""


def fetch(sources: Sources, choice: str, value: ChoiceValue, tuned: TunedLoop) -> Notes:
    """Of a TensorDataset a sampler of lists of indices, so that one indexing operation makes a batch: the documented
    way to switch off automatic batching. Order and random numbers are those of the loader that it replaces."""
    for one in training_loaders(sources, training_step(sources, tuned.trained)):
        call = one.node
        assert isinstance(call, cst.Call)
        dataset = _dataset(one.file, call)
        data = sources.values(one.file, dataset)
        if data is not None and len(data) == 1 and image_sets.kind_of(data[0]):
            image_sets.fetch_whole(sources, choice, one, dataset, data[0])
            continue
        given = _arguments(one.file, call)
        for name in ("batch_sampler", "collate_fn", "worker_init_fn"):
            if name in given:
                raise NoSourceForm(f"{one.file.place(call)}: the loader has its own {name}")
        if "num_workers" in given and one.file.code(given["num_workers"].value) != "0":
            raise NoSourceForm(f"{one.file.place(call)}: the loader has worker processes")
        if not data or not _are_made_by(data, IN_MEMORY):
            raise NoSourceForm(
                f"{one.file.place(call)}: the source does not show that its data set is a TensorDataset or one of "
                "torchvision's in memory; others are fetched by whole batches under flatout run alone"
            )
        for file in sources.files:
            for attribute in file.find(cst.Attribute):
                asked = attribute.attr.value in ASKED_OF_LOADERS
                if asked and dotted(attribute.value).rpartition(".")[2].lower() not in SETTINGS:
                    raise NoSourceForm(f"{file.place(attribute)} reads {dotted(attribute)}")
        _fetch_whole(sources, choice, one, given)
    return ()


def pin_memory(sources: Sources, choice: str, value: ChoiceValue, tuned: TunedLoop) -> Notes:
    """`pin_memory=True`."""
    for one in training_loaders(sources, training_step(sources, tuned.trained)):
        _pin(sources, choice, one)
    return ()


def non_blocking(sources: Sources, choice: str, value: ChoiceValue, tuned: TunedLoop) -> Notes:
    """Page-locked batches, and `non_blocking=True` where they are copied."""
    step = training_step(sources, tuned.trained)
    for one in training_loaders(sources, step):
        _pin(sources, choice, one)
    loop = next((one for one in step.loops if isinstance(one, cst.For)), None)
    names = set() if loop is None else {dotted(one) for one in step.file.find(cst.Name, loop.target)}
    copies = [
        call
        for call in (() if loop is None else step.file.find(cst.Call, loop.body))
        if isinstance(call.func, cst.Attribute)
        and call.func.attr.value in ("to", "cuda")
        and dotted(call.func.value) in names
    ]
    if not copies:
        raise NoSourceForm("the batch's own copies to the GPU were not found in the training loop")
    for call in copies:
        if keyword(call, "non_blocking") is None:
            sources.edits.add_keyword(step.file, call, choice, non_blocking="True")
    return ()


def training_loaders(sources: Sources, step: TrainingStep) -> Sequence[Value]:
    """The calls of DataLoader whose batches train."""
    for loop in step.loops:
        if not isinstance(loop, cst.For):
            continue
        node = loop.iter
        while isinstance(node, cst.Call) and called(node) in AROUND and node.args:
            node = node.args[0].value
        values = sources.values(step.file, node)
        if values and _are_made_by(values, LOADERS):
            return values
    raise NoSourceForm("the source does not show which DataLoader the training loop goes over")


def _are_made_by(values: Sequence[Value], names: frozenset[str]) -> bool:
    """Are all of them calls of one of these?"""
    return all(isinstance(one.node, cst.Call) and one.file.qualified(one.node.func) & names for one in values)


def _arguments(file: SourceFile, call: cst.Call) -> dict[str, cst.Arg]:
    """By the names of the parameters."""
    found = {}
    for place, one in enumerate(call.args):
        if one.star:
            raise NoSourceForm(f"{file.place(call)}: some of the loader's arguments are known only when it runs")
        found[PARAMETERS[place] if one.keyword is None else one.keyword.value] = one
    return found


def _dataset(file: SourceFile, call: cst.Call) -> cst.BaseExpression:
    """What the loader is given first, or by that name."""
    first = next((one for one in call.args[:1] if one.keyword is None and not one.star), keyword(call, "dataset"))
    if first is None:
        raise NoSourceForm(f"{file.place(call)}: the source does not show the loader's data set")
    return first.value


def _fetch_whole(sources: Sources, choice: str, loader: Value, given: dict[str, cst.Arg]) -> None:
    file, call = loader.file, loader.node
    assert isinstance(call, cst.Call)
    code = {name: file.code(one.value) for name, one in given.items()}
    dataset, before = code["dataset"], file.statement_of(call)
    if not dotted(given["dataset"].value):
        if before is None:
            raise NoSourceForm(f"{file.place(call)}: there is no line above it for the data set")
        dataset = sources.fresh_name(file, "training_data")
        sources.edits.insert(file, before, choice, f"{dataset} = {code['dataset']}\n")
    shuffle = code.get("shuffle", "False")
    if shuffle not in ("True", "False"):
        raise NoSourceForm(f"{file.place(call)}: shuffle is {shuffle}")
    if "generator" in given and not dotted(given["generator"].value):
        raise NoSourceForm(f"{file.place(call)}: the generator has no name by which the sampler could share it")
    if code.get("batch_size") == "None":
        raise NoSourceForm(f"{file.place(call)}: with batch_size=None the loader makes no batches")
    if "sampler" in given and _is_none(sources, file, call, given["sampler"].value):
        del code["sampler"]
    order = "RandomSampler" if shuffle == "True" else "SequentialSampler"
    names = _sampler_names(sources, file, choice, "BatchSampler", *(() if "sampler" in code else (order,)))
    generator = f", generator={code['generator']}" if shuffle == "True" and "generator" in code else ""
    sampler = code.get("sampler", "")
    if not sampler:
        sampler = f"{names[-1]}({dataset}{generator})"
    size, last = code.get("batch_size", "1"), code.get("drop_last", "False")
    keywords = {
        "batch_size": "None",
        "sampler": f"{names[0]}({sampler}, {size}, drop_last={last})",
        **{name: code[name] for name in KEPT if name in code},
    }
    first = cst.Arg(cst.parse_expression(dataset))

    def change(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Call)
        made = node.with_changes(args=[first], whitespace_before_args=cst.SimpleWhitespace(""))
        for name, value in keywords.items():
            made = with_keyword(made, name, value)
        return made

    sources.edits.add(Replacement(file=file, node=call, choice=choice, change=change))


def _is_none(sources: Sources, file: SourceFile, call: cst.Call, sampler: cst.BaseExpression) -> bool:
    """Has the loader no sampler, as where a name for one is None? A BatchSampler of None would fail."""
    values = sources.values(file, sampler)
    none = [isinstance(one.node, cst.Name) and one.node.value == "None" for one in values or ()]
    if not none or any(none) != all(none):
        raise NoSourceForm(f"{file.place(call)}: the source does not show whether the sampler is None")
    return all(none)


def _sampler_names(sources: Sources, file: SourceFile, choice: str, *names: str) -> list[str]:
    """What they are called in a file: imported beside DataLoader, where that is imported by name."""
    for one in file.find(cst.ImportFrom):
        if one.module is None or dotted(one.module) != "torch.utils.data" or file.function_of(one) is not None:
            continue
        if isinstance(one.names, cst.ImportStar) or any(alias.asname is not None for alias in one.names):
            continue
        known = [alias.evaluated_name for alias in one.names]
        missing = [name for name in names if name not in known]
        ordered = known == sorted(known)
        if missing:
            change = _importing(missing, ordered=ordered)
            sources.edits.add(Replacement(file=file, node=one, choice=choice, change=change))
        return list(names)
    torch = sources.torch_name(file, choice)
    return [f"{torch}.utils.data.{name}" for name in names]


def _importing(names: Sequence[str], *, ordered: bool) -> Changed:
    def change(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.ImportFrom)
        assert not isinstance(node.names, cst.ImportStar)
        aliases = list(node.names)
        for name in names:
            place = len(aliases)
            if ordered:
                place = next((i for i, one in enumerate(aliases) if one.evaluated_name > name), place)
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            last = place == len(aliases)
            if last and aliases:
                ending = aliases[-1].comma
                aliases[-1] = aliases[-1].with_changes(comma=comma)
                aliases.append(cst.ImportAlias(cst.Name(name), comma=ending))
            else:
                aliases.insert(place, cst.ImportAlias(cst.Name(name), comma=comma))
        return node.with_changes(names=aliases)

    return change


def _pin(sources: Sources, choice: str, loader: Value) -> None:
    file, call = loader.file, loader.node
    assert isinstance(call, cst.Call)
    given = _arguments(file, call)
    if "pin_memory" in given and file.code(given["pin_memory"].value) != "False":
        return
    known = [edit for edit in sources.edits.made if edit.node is call and edit.choice in ("pin_memory", "non_blocking")]
    if not known:
        sources.edits.add_keyword(file, call, choice, pin_memory="True")
