"""`flatout check net.py:make`: builds the model, and says what is wrong with it before it is trained."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.arguments import as_model
from flatout.diagnose.checks import check_facts
from flatout.diagnose.facts import Facts
from flatout.diagnose.finding import Finding
from flatout.diagnose.model_checks import CHECKS
from flatout.diagnose.model_facts import ModelFacts
from flatout.diagnose.model_reading import read_model
from flatout.errors import UsageError, describe_error
from flatout.infer.model_source import load_model
from flatout.report.machine_text import exit_code


@dataclass(frozen=True, kw_only=True)
class ModelCheck:
    """A model and what was found."""

    name: str
    """As it was asked for: 'net.py:make'."""
    model: ModelFacts
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 fine (notes are fine), 2 something should be fixed."""
        return exit_code(self.findings)


def check_model(spec: str) -> ModelCheck:
    """Runs the user's code to build the model; the model itself is not run. UsageError: there is no such model, it
    cannot be built or give its parameters, or it has layers without shapes yet."""
    built = load_model(spec)[0]
    try:
        list(built.named_parameters())
    except Exception as error:
        what = f"the parameters of {spec} cannot be listed: {describe_error(error)}"
        begun = "_parameters" in vars(built)
        limit = "" if begun else f"the __init__ of {type(built).__name__} does not call super().__init__()"
        remedy = "make list(model.parameters()) work in plain Python first" if begun else "call it first"
        raise UsageError(what, limit=limit, remedy=remedy) from error
    model = read_model(as_model(built))
    return ModelCheck(name=spec, model=model, findings=check_facts(Facts(model=model), CHECKS))
