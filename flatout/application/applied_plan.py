"""What of a plan a real run of a script applies: read, checked, verified where it is from elsewhere.

Nothing of torch is imported on the way; what only a new process can have (the order of hashes, a preloaded allocator)
starts this one over, once.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flatout import environment
from flatout.errors import FlatoutError, PlanError, UsageError
from flatout.private_details import arguments_digest, with_home
from flatout.script.entry import Target
from flatout.script.replicas.settings import NOT_IN_RANKS

if TYPE_CHECKING:
    from flatout.levers.lever import Choice
    from flatout.machine.description import Machine
    from flatout.plan import Plan

PLAN_NAME = "flatout.toml"
VERIFICATION_SECONDS = 120.0


class AppliedPlan:
    """The plan of a run, the choices that carry it out, and what is not applied of it."""

    def __init__(
        self,
        target: Target,
        *,
        visible_before: str | None,
        announce: Callable[[str], None],
        while_verifying: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """visible_before: CUDA_VISIBLE_DEVICES before --device, as a process that starts over reads its options again.
        announce: told that trials begin, which take a while; while_verifying: what surrounds them."""
        self.target = target
        self.plan: Plan | None = None
        self.choices: list[Choice] = []
        self.notes: list[str] = []
        self.missed: list[str] = []
        """Those of the notes that say that something of the plan is not applied."""
        self.machine: Machine | None = None
        """None: not needed yet."""
        self.proved_for: str | None = None
        self._verified = False
        self._visible_before = visible_before
        self._announce, self._while_verifying = announce, while_verifying

    def read(self, path: str | None, without: Sequence[str] = ()) -> None:
        """From a file, or from flatout.toml where that is for this script. PlanError for what no script takes."""
        if (verified := environment.verified_plan()) is not None:
            self._take_over(verified)
            return
        plan = self._read(path)
        if plan is None and without:
            raise UsageError(
                f"without is {', '.join(without)}, and there is no plan",
                limit="it leaves out choices of a plan",
                remedy="run `flatout tune` first, or name a plan",
            )
        self.plan = self._with_own_flops(plan.without(*without)) if plan is not None else None

    def make_deterministic(self) -> None:
        """Leave out what makes runs differ, and set what makes them repeat."""
        from flatout.plan_choices import declared
        from flatout.script.deterministic import make_deterministic

        changed = environment.deterministic_environment()
        if changed is not None:  # the order of hashes is fixed when Python starts
            self._start_over(changed)
        unrepeatable = [name for name, one in declared().items() if not one.repeatable]
        self.leave_out(unrepeatable, "the run is to be deterministic")
        make_deterministic()

    def leave_out(self, names: Sequence[str], why: str) -> None:
        """Without those of these choices that it has."""
        chosen = self.plan.choices() if self.plan is not None else {}
        left_out = [name for name in names if name in chosen]
        if self.plan is not None and left_out:
            self.plan = self.plan.without(*left_out)
            self._miss(f"left out, because {why}: {', '.join(left_out)}")

    def for_ranks(self, count: int, *, on_cpu: bool) -> None:
        """In each of so many ranks, which share the cores or have a GPU each."""
        if self.plan is None:
            return
        planned, names = self.plan.devices, list(NOT_IN_RANKS)
        if on_cpu and planned != count:  # they were chosen for another number of processes
            names.append("threads")
        # The FLOPs are of a step on one device, of which a rank computes a part.
        self.plan = replace(self.plan.without("devices"), flops_per_step=None)
        if planned not in (None, count):
            self.notes.append(f"the plan is for {planned} devices, and {count} train")
        self.leave_out(names, "several devices train")

    def mismatch(self) -> str | None:
        """Why the plan must be verified here before it is applied; None: it need not be, or there is none."""
        from flatout.machine.detect import detect

        if self.plan is None:
            return None
        self.machine = self.machine or detect()
        return self.plan.mismatch(self.machine.fingerprint, self.machine.versions.torch)

    def choose(self, *, trusted: bool, verifies: bool = True) -> None:
        """Fill `choices`; trusted: a plan from another machine, torch or arguments is not verified here first.
        verifies: may it be? Otherwise it is not applied; nor is it in one of several ranks, whose trials would have no
        others."""
        environment.forget_verified_plan()
        if self.plan is None:
            return
        if changed := self._edited_since(self.plan):
            self.plan = replace(self.plan, flops_per_step=None)
        if not self.plan.choices():
            return
        from flatout.levers.catalogue import LEVERS
        from flatout.levers.lever import choices_of_plan

        mismatch = self.mismatch()
        assert self.machine is not None
        if mismatch is not None and not trusted and not (verifies and environment.rank() is None):
            self._miss(f"{mismatch}: not applied (--trust-plan applies it all the same)")
            self.plan = self.plan.without(*self.plan.choices())
        elif mismatch is not None and not trusted:
            self._verify(self.plan, mismatch, self.machine)
        elif not trusted:
            self._compare(self.plan, changed)
        self.choices = choices_of_plan(self.plan.choices(), LEVERS, self.plan.proved_reduced)
        self._enter_environment()

    def note_unfollowed(self, why: str) -> None:
        """Processes that the script starts cannot be followed."""
        text = f"processes that the script starts are not watched ({why})"
        if self.choices:
            self._miss(f"{text}, and the plan is not applied in them")
        else:
            self.notes.append(text)

    def _read(self, path: str | None) -> Plan | None:
        from flatout.plan import read_plan

        if path is not None:
            return for_scripts(path, read_plan(path))
        if not Path(PLAN_NAME).exists():
            return None
        plan = read_plan(PLAN_NAME)
        if plan.script is not None and not same_script(plan.script, self.target):
            self._miss(f"{PLAN_NAME} is for {plan.script}: not applied (give --plan to apply it all the same)")
            return None
        return for_scripts(PLAN_NAME, plan)

    def _with_own_flops(self, plan: Plan) -> Plan:
        """FLOPs were counted of a step of one script with its arguments; a step of this run may be another one."""
        same = self._is_for_this_script(plan) and self._has_its_arguments(plan)
        return plan if same else replace(plan, flops_per_step=None)

    def _edited_since(self, plan: Plan) -> list[str]:
        """Of the script's own files, those that were edited since the tune."""
        from flatout.script.own_files import changed_since

        return changed_since(self.target, plan.sources) if plan.sources and self._is_for_this_script(plan) else []

    def _is_for_this_script(self, plan: Plan) -> bool:
        return plan.script is not None and same_script(plan.script, self.target)

    def _has_its_source(self, plan: Plan) -> bool:
        """A script that is named from another folder has the files that were tuned all the same."""
        from flatout.script.own_files import changed_since

        return bool(plan.sources) and not changed_since(self.target, plan.sources)

    def _has_its_arguments(self, plan: Plan) -> bool:
        return plan.arguments_digest == arguments_digest(self.target.arguments)

    def _compare(self, plan: Plan, changed: Sequence[str]) -> None:
        """Another script, other arguments, or another source may mean another loop: what was proved in lower precision
        is applied to the same one alone."""
        if plan.script is not None and not self._is_for_this_script(plan) and not self._has_its_source(plan):
            self.notes.append(f"the plan was tuned for {plan.script}, not for this script: tune this one to be sure")
            self.proved_for = plan.loop or ""
        if plan.script is not None and not self._has_its_arguments(plan):
            tuned = f" ({shlex.join(plan.argv)})" if plan.argv else ""  # a plan may keep their digest alone
            self.notes.append(f"the plan was tuned with other arguments{tuned}: tune again with these to be sure")
            self.proved_for = plan.loop or ""
        if changed:
            self.notes.append(f"{', '.join(changed)} changed since the tune: tune again to be sure")
            self.proved_for = plan.loop or ""

    def _verify(self, plan: Plan, mismatch: str, machine: Machine) -> None:
        """A plan from elsewhere is a suggestion: its choices are tried here, and those that hold are applied."""
        from flatout.tuning.script_tuning import TuneRequest, tune_script

        self._announce(f"{mismatch}: verifying it here first (--trust-plan skips this)")
        request = TuneRequest(
            target=self.target, budget_seconds=VERIFICATION_SECONDS, only=tuple(plan.choices().items())
        )
        try:
            with self._while_verifying():
                result = tune_script(request, machine)
        except FlatoutError as error:
            why = "; ".join(filter(None, [error.what, error.limit]))
            self._miss(
                f"{mismatch}, so the script runs without the plan: it could not be verified here ({why}); "
                "--trust-plan applies it all the same"
            )
            self.plan = plan.without(*plan.choices())
            return
        held = ", ".join(result.plan.choices()) or "nothing"
        text = f"{mismatch}; verified here: {held} holds (again in every run; flatout tune writes a plan for here)"
        if result.plan.choices() == plan.choices():
            self.notes.append(text)
        else:
            self._miss(text)
        self.plan, self._verified = result.plan, True

    def _enter_environment(self) -> None:
        """What only a new process can have (a preloaded allocator) means starting over, once."""
        if any(choice.lever.compiles for choice in self.choices):
            environment.use_inductor_cache()
        for choice in self.choices:
            needed = choice.lever.environment(choice.value)
            if (visible := needed.get("CUDA_VISIBLE_DEVICES")) is not None:
                environment.show_cuda_devices(visible)  # CUDA has not started
            library = needed.get("LD_PRELOAD")
            if library and library not in environment.preloaded_libraries():
                self._start_over(environment.with_preloaded(library))

    def _take_over(self, text: str) -> None:
        from flatout.plan import Plan

        toml, self.notes, self.missed = json.loads(text)
        self.plan = Plan.from_toml(toml)

    def _start_over(self, variables: dict[str, str]) -> None:
        if self._verified and self.plan is not None:
            # In there a preloaded allocator is already in force, so the plan could not be verified again.
            handed_over = json.dumps([self.plan.without_private().to_toml(), self.notes, self.missed])
            variables = {**variables, environment.VERIFIED_PLAN: handed_over}
        os.execve(sys.executable, [*sys.orig_argv], environment.with_visible(variables, self._visible_before))

    def _miss(self, text: str) -> None:
        self.notes.append(text)
        self.missed.append(text)


def for_scripts(path: str, plan: Plan) -> Plan:
    """The plan; PlanError where it chooses what no script can be given."""
    try:
        plan.check_for("script")
    except PlanError as error:
        raise PlanError(f"{path}: {error.what}", limit=error.limit, remedy=error.remedy) from None
    return plan


def same_script(planned: str, target: Target) -> bool:
    """'train.py', './train.py' and its absolute path are one script."""
    planned = with_home(planned)
    if planned == target.name:
        return True
    both = target.path is not None and not planned.startswith("-m ")
    return both and os.path.realpath(planned) == os.path.realpath(str(target.path))
