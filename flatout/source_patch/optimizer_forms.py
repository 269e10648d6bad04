"""The optimizer's implementation and zero_grad: keywords of their calls."""

from __future__ import annotations

import libcst as cst

from flatout.plan_choices import ChoiceValue
from flatout.source_patch.edits import NoSourceForm, Replacement
from flatout.source_patch.known_calls import FOREACH, FUSABLE, optimizer_kind
from flatout.source_patch.setting_forms import Notes
from flatout.source_patch.source_file import SourceFile, called, keyword
from flatout.source_patch.sources import Sources
from flatout.source_patch.tuned_loop import TunedLoop

OptimizerCall = tuple[SourceFile, cst.Call, str]
"""A call that makes an optimizer of a kind of torch.optim."""
CHOSEN = ("fused", "foreach", "capturable", "differentiable")
"""Keywords by which a script chooses the implementation itself."""


def optimizer(sources: Sources, choice: str, value: ChoiceValue, tuned: TunedLoop) -> Notes:
    """`fused=True` or `foreach=True` for every optimizer that has it and that the tuned run made."""
    name, kinds = str(value), FUSABLE if value == "fused" else FOREACH
    made = [(file, call, optimizer_kind(file.qualified(call.func))) for file, call in sources.calls()]
    seen = tuned.optimizers
    fitting = [one for one in made if one[2] in kinds and (seen is None or one[2] in seen)]
    if not fitting:
        wanted = ", ".join(sorted(seen or kinds))
        raise NoSourceForm(f"no call of torch.optim's {wanted} was found by name")
    fitting, notes = _made(fitting, tuned)
    for file, call, kind in fitting:
        place = file.place(call)
        if any(one.star == "**" for one in call.args):
            raise NoSourceForm(f"{place} passes keywords of {kind} that are known only when the script runs")
        if (given := next((one for one in CHOSEN if keyword(call, one)), None)) is not None:
            raise NoSourceForm(f"{place} sets {given} itself")
        if name == "fused" and kind == "SGD" and sources.mentions("requires_grad"):
            reason = "torch's fused SGD takes momentum of parameters that are unfrozen later for that of the others"
            raise NoSourceForm(f"the script mentions requires_grad, and {reason}")
        sources.edits.add_keyword(file, call, choice, **{name: "True"})
    return notes


def _made(found: list[OptimizerCall], tuned: TunedLoop) -> tuple[list[OptimizerCall], Notes]:
    """Those that the tuned run made, or may have made, and what the others are. NoSourceForm where it made none of
    them."""
    made = [(one, tuned.made(one[0], one[1])) for one in found]
    kept = [one for one, known in made if known is not False]
    if not kept:
        where = ", ".join(sorted(tuned.made_at or ()))
        raise NoSourceForm(f"the tuned run made its optimizer at {where}, where its class is not called by name")
    notes = [f"{one[0].place(one[1])} is left: the tuned run did not make it" for one, known in made if known is False]
    unknown = [one[0].place(one[1]) for one, known in made if known is None]
    if len(unknown) > 1:
        notes.append(f"which of {', '.join(unknown)} the tuned run made is not known: all of them are changed")
    return kept, tuple(notes)


def zero_grad(sources: Sources, choice: str, value: ChoiceValue, tuned: TunedLoop) -> Notes:
    """`set_to_none=True`, where nothing in the script looks at gradients."""
    mentioned = sources.mentions(".grad\n", ".grad ", ".grad.", ".grad)", ".grad,", ".grad[", "requires_grad")
    if mentioned:
        raise NoSourceForm(f"the script mentions {mentioned.strip()}, and a gradient that is None is not zero there")
    found = [
        (file, given.value)
        for file, call in sources.calls()
        if called(call) == "zero_grad" and (given := _argument(call)) is not None and _is_false(given.value)
    ]
    if not found:
        raise NoSourceForm("no call of zero_grad(set_to_none=False) was found")
    for file, node in found:
        sources.edits.add(Replacement(file=file, node=node, choice=choice, change=lambda _: cst.Name("True")))
    return ("the same numbers only if every parameter gets a gradient in every step",)


def _argument(call: cst.Call) -> cst.Arg | None:
    given = keyword(call, "set_to_none")
    return given or next((one for one in call.args if one.keyword is None and not one.star), None)


def _is_false(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Name) and node.value == "False"
