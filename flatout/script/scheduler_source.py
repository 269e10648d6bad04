"""What the source says of learning rate schedulers: those that nothing uses, and those that step first in an epoch.

    trees = {"train.py": ast.parse(text)}
    unused_schedulers(trees)              # [("train.py", <the call that makes it>)]
    first_in_epochs(trees["train.py"])    # [(scheduler.step(), the statement with optimizer.step())]

Names are followed within one file by how they are assigned; what cannot be followed counts as used.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

SCHEDULERS = (
    "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "SequentialLR",
    "CosineAnnealingLR", "ChainedScheduler", "ReduceLROnPlateau", "CyclicLR", "CosineAnnealingWarmRestarts",
    "OneCycleLR", "PolynomialLR", "SWALR",
)  # fmt: skip
READS = ("get_last_lr", "get_lr", "state_dict", "load_state_dict", "last_epoch", "optimizer", "print_lr", "base_lrs")
"""What is asked of a scheduler without stepping it."""
LOOKUPS = ("locals", "globals", "vars", "eval", "exec", "getattr")
"""They reach names that the source does not show."""
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def unused_schedulers(trees: Mapping[str, ast.Module]) -> list[tuple[str, ast.Call]]:
    """(file, call that makes it) of schedulers that are stored under a name, or not at all, and never given to
    anything or stepped."""
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    if any(isinstance(node, ast.Name) and node.id in LOOKUPS for node in nodes):
        return []
    used = _used_names(nodes)
    return [
        (file, call) for file, tree in trees.items() for name, call in _made(tree) if name is None or name not in used
    ]


def _made(tree: ast.Module) -> Iterator[tuple[str | None, ast.Call]]:
    """(last part of the name, call); no name: the result is dropped."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _makes_scheduler(node.value):
            assert isinstance(node.value, ast.Call)
            yield None, node.value
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and _makes_scheduler(node.value):
            assert isinstance(node.value, ast.Call)
            name = _last_part(node.targets[0])
            if name:
                yield name, node.value


def _makes_scheduler(node: ast.expr) -> bool:
    """A given last_epoch goes on from elsewhere."""
    if not isinstance(node, ast.Call) or _last_part(node.func) not in SCHEDULERS:
        return False
    return not any(one.arg in (None, "last_epoch") for one in node.keywords)


def _used_names(nodes: list[ast.AST]) -> set[str]:
    """Last parts of names that are read for anything but READS; `lr_scheduler.StepLR` is the module."""
    only_read = {node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in (*READS, *SCHEDULERS)}
    return {
        _last_part(node)
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and node not in only_read
    }


def first_in_epochs(tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.stmt]]:
    """(the scheduler's step, the statement in which the optimizer steps many times) of loops over epochs in which the
    first stands before the second. A step that is told its epoch is meant to come first."""
    schedulers = {name for name, _ in _made(tree) if name}
    names = _OptimizerSteps(tree)
    for node in ast.walk(tree):
        if not isinstance(node, _LOOPS) or names.before(node):
            continue
        early: ast.stmt | None = None
        for statement in node.body:
            if early is None and _is_step_of(statement, schedulers):
                early = statement
            elif names.many(statement):
                if early is not None:
                    yield early, statement
                break
            elif names.some(statement):
                break


class _OptimizerSteps:
    """Where a file steps its optimizers."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)}
        made = (node for node in ast.walk(tree) if isinstance(node, ast.Assign) and len(node.targets) == 1)
        self._optimizers = {_last_part(node.targets[0]) for node in made if _is_of_torch_optim(node.value)}

    def some(self, node: ast.AST, depth: int = 3) -> bool:
        """Does it step an optimizer, itself or in a function of the file that it calls?"""
        for one in ast.walk(node):
            if not isinstance(one, ast.Call):
                continue
            function = self._functions.get(_last_part(one.func))
            if self._is_step(one) or (function is not None and depth and self.some(function, depth - 1)):
                return True
        return False

    def many(self, statement: ast.stmt, depth: int = 3) -> bool:
        """Does it so in a loop?"""
        for one in ast.walk(statement):
            if isinstance(one, _LOOPS) and self.some(one):
                return True
            function = self._functions.get(_last_part(one.func)) if isinstance(one, ast.Call) and depth else None
            if function is not None and any(self.many(inner, depth - 1) for inner in function.body):
                return True
        return False

    def before(self, loop: ast.stmt) -> bool:
        """Has an optimizer stepped earlier in the same function, so that the loop is not the first that trains?"""
        for node in ast.walk(self._tree):
            for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
                if isinstance(block, list) and loop in block:
                    earlier = block[: block.index(loop)]
                    return any(self.some(one) for one in earlier if not isinstance(one, (*_FUNCTIONS, ast.ClassDef)))
        return False

    def _is_step(self, call: ast.Call) -> bool:
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
            return False
        owner = _last_part(call.func.value)
        return owner in self._optimizers or any(part in owner.lower() for part in ("opt", "scaler"))


def _is_of_torch_optim(node: ast.expr) -> bool:
    """Of `torch.optim.SGD(...)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return _last_part(node.func.value) == "optim"


def _is_step_of(statement: ast.stmt, schedulers: set[str]) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    return _last_part(call.func.value) in schedulers and not call.args and not call.keywords


def _last_part(node: ast.AST) -> str:
    """'scheduler' of `self.scheduler`; '' of what is no name."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
