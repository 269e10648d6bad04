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
    cannot be built, or it has layers without shapes yet."""
    model = read_model(as_model(load_model(spec)[0]))
    return ModelCheck(name=spec, model=model, findings=check_facts(Facts(model=model), CHECKS))
