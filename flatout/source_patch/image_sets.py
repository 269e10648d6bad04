"""Whole batches of torchvision's image sets that are in memory: a subclass with `__getitems__`, which a DataLoader asks
for all samples of a batch at once."""

from __future__ import annotations

import libcst as cst

from flatout.source_patch.edits import Insertion, NoSourceForm, Replacement
from flatout.source_patch.source_file import SourceFile, dotted
from flatout.source_patch.sources import Sources, Value, last_import

GREY, COLOURED = ("MNIST", "FashionMNIST", "KMNIST"), ("CIFAR10", "CIFAR100")
DATA_SETS, TRANSFORMS = ("torchvision.datasets", "torchvision.transforms")
PARAMETERS = ("root", "train", "transform", "target_transform", "download")
"""Of all these sets, in their order."""
IN_THE_WAY = (
    *("collate_fn", "batch_sampler", "batch_size=None", ".dataset.transform"),
    *("set_default_dtype", "set_default_device"),
)
"""Words of a source whose batches may be others."""


def kind_of(data: Value) -> str:
    """'MNIST' for a call that makes torchvision's class of that name; '' for anything else."""
    for kind in (*GREY, *COLOURED):
        if _makes(data, f"{DATA_SETS}.{kind}", f"{DATA_SETS}.{'mnist' if kind in GREY else 'cifar'}.{kind}"):
            return kind
    return ""


def fetch_whole(sources: Sources, choice: str, loader: Value, dataset: cst.BaseExpression, data: Value) -> None:
    """dataset: as the loader is given it; data: the call that makes it."""
    file, call, made, kind = data.file, loader.node, data.node, kind_of(data)
    assert isinstance(call, cst.Call)
    assert isinstance(made, cst.Call)
    place = loader.file.place(call)
    if word := sources.mentions(*IN_THE_WAY):
        raise NoSourceForm(f"{place}: whole batches of {kind} are known to be the loader's own only without {word}")
    if any(node.value == kind and not _is_attribute(file, node) for node in file.find(cst.Name)):
        raise NoSourceForm(f"{place}: {kind} is a name that other code may use too")
    if dataset is not made and not _is_the_loaders_alone(sources, data, dotted(dataset)):
        raise NoSourceForm(f"{place}: the source does not show that nothing else uses {dotted(dataset) or kind}")
    more = _goes_on_after_to_tensor(sources, data, kind)
    images, labels = "self.data[indices].unsqueeze(1)", "self.targets[indices].long()"
    if kind in COLOURED:  # an array with the channels last, and a list
        torch = sources.torch_name(file, choice)
        images = f"{torch}.from_numpy(self.data[indices]).permute(0, 3, 1, 2).contiguous()"
        labels = f"{torch}.tensor([self.targets[index] for index in indices])"
    lines = [
        f"class {kind}({dotted(made.func)}):",
        '    """Makes whole batches at once."""',
        "",
        "    def __getitems__(self, indices):",
        f"        images = {images}.float().div(255)",
        *(("        for transform in self.transform.transforms[1:]:", "            images = transform(images)") * more),
        f"        return images, {labels}",
        "",
    ]
    where = last_import(file)
    sources.edits.add(Insertion(file=file, node=where, choice=choice, code="\n".join(lines), after=True, blank_lines=2))

    def change(node: cst.CSTNode) -> cst.CSTNode:
        return node.with_changes(func=cst.Name(kind))

    sources.edits.add(Replacement(file=file, node=made, choice=choice, change=change))
    sources.edits.add_keyword(loader.file, call, choice, collate_fn="list")


def _is_attribute(file: SourceFile, name: cst.Name) -> bool:
    """Is it `x` of `a.x`?"""
    above = file.parents[name]
    return isinstance(above, cst.Attribute) and above.attr is name


def _is_the_loaders_alone(sources: Sources, data: Value, name: str) -> bool:
    """Is the data set given this name, which then stands in the loader's call and nowhere else?"""
    above = data.file.parents[data.node]
    if not name or not isinstance(above, cst.Assign) or [dotted(one.target) for one in above.targets] != [name]:
        return False
    kinds = (cst.Name, cst.Attribute)
    return sum(dotted(node) == name for file in sources.files for kind in kinds for node in file.find(kind)) == 2


def _goes_on_after_to_tensor(sources: Sources, data: Value, kind: str) -> bool:
    """Is `ToTensor()` followed by `Normalize`? NoSourceForm where the source does not show that no other transforms are
    in use: these give for a batch what they give for each image."""
    call, unknown = data.node, f"the source does not show that {kind} goes through ToTensor and Normalize alone"
    assert isinstance(call, cst.Call)
    given = {PARAMETERS[i] if one.keyword is None else one.keyword.value: one for i, one in enumerate(call.args[:5])}
    values = sources.values(data.file, given["transform"].value) if "transform" in given else None
    parts = _parts(values[0]) if values is not None and len(values) == 1 else []
    names = [next((name for name in ("ToTensor", "Normalize") if _is_transform(one, name)), "") for one in parts]
    known = names[:1] == ["ToTensor"] and all(name == "Normalize" for name in names[1:])
    if not known or "target_transform" in given or any(one.star for one in call.args):
        raise NoSourceForm(f"{data.file.place(call)}: {unknown}")
    return len(names) > 1


def _parts(transform: Value) -> list[Value]:
    """Those of a Compose of a list, or the transform itself."""
    call = transform.node
    if isinstance(call, cst.Call) and _is_transform(transform, "Compose") and len(call.args) == 1:
        listed = call.args[0].value
        if isinstance(listed, (cst.List, cst.Tuple)):
            return [Value(file=transform.file, node=one.value) for one in listed.elements]
    return [transform]


def _is_transform(value: Value, name: str) -> bool:
    return _makes(value, f"{TRANSFORMS}.{name}", f"{TRANSFORMS}.transforms.{name}")


def _makes(value: Value, *names: str) -> bool:
    """Is it a call of what has one of these full names?"""
    found = value.file.qualified(value.node.func) if isinstance(value.node, cst.Call) else set()
    return bool(found) and found <= {*names}
