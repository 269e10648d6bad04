"""Changes where the model is made or called: memory format, torch.compile."""

from __future__ import annotations

import libcst as cst

from flatout.plan_choices import ChoiceValue
from flatout.source_patch.edits import Changed, NoSourceForm, Replacement, with_keyword
from flatout.source_patch.setting_forms import Notes
from flatout.source_patch.source_file import SourceFile, Statement, called, dotted, walk
from flatout.source_patch.sources import Sources, argument_of, binds, has_parameter
from flatout.source_patch.training_step import TrainingStep, root_class, training_step
from flatout.source_patch.tuned_loop import TunedLoop

AS_EAGER = '{"fallback_random": True}'
"""Options with which compiled code draws the random numbers that eager code draws, so that dropout is the same."""
USES_OF_A_MODEL = frozenset(("parameters", "named_parameters", "modules", "train", "eval", "zero_grad", "training"))
"""What may be asked of a compiled model in the place of the model itself."""


def memory_format(sources: Sources, choice: str, value: ChoiceValue, tuned: TunedLoop) -> Notes:
    """Weights as NHWC, from the start: a convolution with such weights has an NHWC result, whatever its input is."""
    step = training_step(sources, tuned.trained)
    values = sources.values(step.file, step.calls[0].func)
    if not values or not all(root_class(sources, one) for one in values):
        raise NoSourceForm(f"the source does not show where {step.model} is made")
    for one in values:
        torch = sources.torch_name(one.file, choice)
        chain = _chain(one.node)
        moved = next((call for call in chain if called(call) == "to" and call.args), None)
        if moved is not None and not any(argument.star for argument in moved.args):
            sources.edits.add_keyword(one.file, moved, choice, memory_format=f"{torch}.channels_last")
        else:
            sources.edits.add(Replacement(file=one.file, node=one.node, choice=choice, change=_to_channels_last(torch)))
    notes: Notes = (
        "weights, their gradients and the optimizer's state are NHWC too, in evaluation and in checkpoints",
    )
    if sources.mentions("Dropout(", "dropout(", "rand_like(", "randn_like(", "normal_(", "uniform_("):
        notes += ("dropout and noise of images are drawn in NHWC's order: other random numbers than under flatout run",)
    return notes


def _chain(node: cst.BaseExpression) -> list[cst.Call]:
    """`X.to(a)`, then what it is called on, and so on."""
    found = []
    while isinstance(node, cst.Call):
        found.append(node)
        node = node.func.value if isinstance(node.func, cst.Attribute) else node.func
    return found


def _to_channels_last(torch: str) -> Changed:
    def change(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.BaseExpression)
        moved = cst.Call(func=cst.Attribute(value=node, attr=cst.Name("to")))
        return with_keyword(moved, "memory_format", f"{torch}.channels_last")

    return change


def compile_model(sources: Sources, choice: str, value: ChoiceValue, tuned: TunedLoop) -> Notes:
    """A compiled model beside the model, for the calls that train; or each repeated block in place."""
    asked = sources.mentions("retain_graph", "create_graph")
    if asked:
        raise NoSourceForm(f"the script mentions {asked}, for which torch.compile needs other settings")
    step = training_step(sources, tuned.trained)
    if value == "regional":
        return _compile_blocks(sources, choice, step, tuned.repeated_block)
    file, model = step.file, step.model
    torch = sources.torch_name(file, choice)
    how = f"options={AS_EAGER}" if value == "default" else f'mode="{value}"'
    name = sources.fresh_name(file, f"compiled_{model.rpartition('.')[2]}")
    renamed: list[cst.BaseExpression] = [one.func for one in step.calls]
    where: Statement | None = None
    caller = _only_caller(sources, step)
    if caller is not None and caller[0] is file and _may_be_compiled(step):
        call = caller[1]
        argument = _argument_of_model(step, call)
        if argument is not None:
            model, renamed = dotted(argument.value), [argument.value]
            where = _before_loop(file, call, model)
        elif step.function is not None and not has_parameter(step.function, model):
            around = file.function_of(call)
            if around is None or around is file.function_of(step.function):  # the function sees names of that place
                where = _before_loop(file, call, model)
    where = _before_training(step) if where is None else where
    sources.edits.insert(file, where, choice, f"{name} = {torch}.compile({model}, {how})\n")
    for node in renamed:
        sources.edits.add(Replacement(file=file, node=node, choice=choice, change=lambda _: cst.Name(name)))
    return () if value == "default" else ("dropout draws other random numbers than under flatout run",)


def _only_caller(sources: Sources, step: TrainingStep) -> tuple[SourceFile, cst.Call] | None:
    """The one call of the function that trains."""
    if step.function is None or len(sources.functions(step.function.name.value)) > 1:
        return None
    calls = sources.callers(step.file, step.function)
    return calls[0] if len(calls) == 1 else None


def _argument_of_model(step: TrainingStep, call: cst.Call) -> cst.Arg | None:
    """What the caller passes as the model; None: the function has it from elsewhere."""
    if not has_parameter(step.function, step.model):
        return None
    is_method = step.file.class_of(step.function) is not None
    argument = argument_of(call, step.function, step.model, is_method=is_method)
    return argument if argument is not None and dotted(argument.value) else None


def _may_be_compiled(step: TrainingStep) -> bool:
    """May the function be given a compiled model? It must call it in training alone, and ask nothing else of it than
    what a compiled model answers as the model does. A name that is no parameter only has to stay what it is."""
    function = step.function
    if function is None or binds(function.body, step.model):
        return False
    if not has_parameter(function, step.model):
        return "." not in step.model
    mine = {call.func for call in step.calls}
    for node in walk(function.body):
        if not isinstance(node, cst.Name) or node.value != step.model or node in mine:
            continue
        parent = step.file.parents[node]
        if isinstance(parent, cst.Arg) and parent.keyword is node:
            continue
        if isinstance(parent, cst.Attribute) and parent.attr is node:
            continue
        if not (isinstance(parent, cst.Attribute) and parent.value is node and parent.attr.value in USES_OF_A_MODEL):
            return False
    return True


def _before_training(step: TrainingStep) -> Statement:
    """The outermost loop around the step, in its function, in which the model stays the same. Without one the lines
    there run in every step."""
    where = _before_loop(step.file, step.backward, step.model)
    if where is step.file.statement_of(step.backward):
        raise NoSourceForm(
            f"{step.file.place(step.backward)}: no loop is around the step in its function, before which {step.model} "
            "is compiled"
        )
    return where


def _before_loop(file: SourceFile, node: cst.CSTNode, model: str) -> Statement:
    """The outermost loop around `node`, in its function, in which the model stays the same; or its own statement."""
    function = file.function_of(node)
    found = file.statement_of(node)
    for one in file.ancestors(node):
        if one is function:
            break
        if isinstance(one, (cst.For, cst.While)):
            if binds(one.body, model):
                break
            found = file.statement_of(one)
    if found is None:
        raise NoSourceForm(f"{file.place(node)} shares its line with the header of its block")
    return found


def _compile_blocks(sources: Sources, choice: str, step: TrainingStep, block: str) -> Notes:
    if not block:
        raise NoSourceForm("only the report of the tune names the blocks that repeat, and it is not there")
    classes = sources.classes(block)
    if not classes:
        raise NoSourceForm(
            f"no file of the script has the class {block} of the blocks; torch's own is not compiled in place"
        )
    file, model, caller = step.file, step.model, _only_caller(sources, step)
    where: Statement | None = None
    if caller is not None and step.function is not None:
        argument = _argument_of_model(step, caller[1])
        is_own = has_parameter(step.function, model) or "." in model or binds(step.function.body, model)
        if argument is not None or not is_own:
            file, model = caller[0], model if argument is None else dotted(argument.value)
            where = _before_loop(file, caller[1], model)
    where = _before_training(step) if where is None else where
    name = sources.fresh_name(file, "repeated_block")
    known = file.find(cst.ClassDef) if classes[0][0] is file else ()
    seen = any(
        one.name.value == block and file.class_of(one) is None and file.function_of(one) is None for one in known
    )
    test = f"isinstance({name}, {block})" if seen else f'type({name}).__name__ == "{block}"'
    sizes = "" if _alike(sources, block) else "dynamic=False, "
    code = f"for {name} in {model}.modules():\n    if {test}:\n        {name}.compile({sizes}options={AS_EAGER})\n"
    sources.edits.insert(file, where, choice, code)
    return ("evaluation runs the compiled blocks too, so that its numbers may differ by rounding",)


def _alike(sources: Sources, block: str) -> bool:
    """Are all blocks made by one call, with arguments that are the same for each? Then they have the same shapes."""
    made = [(file, call) for file, call in sources.calls() if called(call) == block and not file.qualified(call.func)]
    if len(made) != 1:
        return False
    file, call = made[0]
    for one in file.ancestors(call):
        if isinstance(one, (cst.ListComp, cst.GeneratorExp)):
            names = {dotted(name) for name in file.find(cst.Name, one.for_in.target)}
            return not names & {name.value for name in file.find(cst.Name, call)}
    return False
