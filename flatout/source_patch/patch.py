"""The patch of a script for a plan: each choice in turn, then the difference of the files.

patch = source_patch(plan, paths, report=document, folder=Path())
patch.files, patch.changes, patch.left
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from flatout.levers.catalogue import LEVERS
from flatout.plan import Plan
from flatout.plan_choices import ChoiceValue
from flatout.source_patch.edits import Edit, InContext, Insertion, NoSourceForm
from flatout.source_patch.forms import FORMS, WITHOUT_FORM, environment_of
from flatout.source_patch.result import LeftToRun, PatchedFile, SourceChange, SourcePatch
from flatout.source_patch.source_file import SourceFile
from flatout.source_patch.sources import Sources
from flatout.source_patch.tuned_loop import TuneReport
from flatout.source_patch.unified_diff import Mark, hunks


def source_patch(
    plan: Plan,
    paths: Sequence[Path],
    *,
    name: str,
    report: Mapping[str, object] | None,
    no_report: str,
    warnings: Sequence[str] = (),
) -> SourcePatch:
    """paths: the script's own files, itself first. report: the document of its tune; None: `no_report` says why. Raises
    ScriptError where a file is not Python."""
    sources, tuned = Sources.read(paths), TuneReport(plan, report, no_report)
    loop, edits = tuned.loop(), sources.edits
    changes: list[SourceChange] = []
    left: list[LeftToRun] = []
    for choice, value in plan.choices().items():
        if not any(one.takes(value) for one in LEVERS if one.plan_field == choice) and choice in FORMS:
            continue  # False, or precision = "fp32": flatout run does nothing for it either
        gain, before = tuned.gain(choice, value), len(edits.made)
        try:
            if choice not in FORMS:
                raise NoSourceForm(WITHOUT_FORM.get(choice, "it has no form in source"))
            notes = FORMS[choice](sources, choice, value, loop)
        except NoSourceForm as error:
            del edits.made[before:]
            variables = (*environment_of(choice, value), *_preloaded(choice, value))
            left.append(LeftToRun(choice=choice, value=value, gain=gain, reason=str(error), command=variables))
            continue
        changes.append(SourceChange(choice=choice, value=value, gain=gain, notes=notes))
    changed = list(dict.fromkeys(edit.file for edit in edits.made))
    folder = _folder(changed)
    return SourcePatch(
        script=name,
        folder="" if folder == os.getcwd() else folder,
        files=tuple(_patched(sources, file, folder) for file in changed),
        changes=tuple(changes),
        left=tuple(left),
        total=tuned.total(),
        machine=plan.machine_name,
        torch_version=plan.torch_version,
        warnings=tuple(warnings),
    )


def _preloaded(choice: str, value: ChoiceValue) -> tuple[str, ...]:
    """The variables of levers that are nothing else, such as a preloaded allocator."""
    levers = [one for one in LEVERS if one.plan_field == choice and one.switch == "process" and one.takes(value)]
    found = {name: text for lever in levers if choice == "allocator" for name, text in lever.environment(value).items()}
    return tuple(f"{name}={text}" for name, text in found.items())


def _patched(sources: Sources, file: SourceFile, folder: str) -> PatchedFile:
    new = sources.edits.applied(file)
    compile(new, str(file.path), "exec", dont_inherit=True)  # what was made must be Python
    marks: list[Mark] = []
    for edit in sources.edits.made:
        if edit.file is file:
            marks.append((edit.choice, *_lines(file, edit)))
    name = os.path.relpath(os.path.realpath(file.path), os.path.realpath(folder))
    return PatchedFile(name=name, hunks=hunks(file.content, new, marks), content=new)


def _lines(file: SourceFile, edit: Edit) -> tuple[int, int]:
    """The lines of the old file between or at which it changes something."""
    first, last = file.lines(edit.node)
    if isinstance(edit, Insertion):
        return (last, last) if edit.after else (first, first)
    return first, file.lines(edit.last)[1] if isinstance(edit, InContext) else last


def _folder(files: Sequence[SourceFile]) -> str:
    """Where the patch is applied: here, if the files are in this folder or below; or the folder that they share, since
    no tool follows '..' in a patch."""
    here = os.getcwd()
    places = [os.path.dirname(os.path.realpath(file.path)) for file in files]
    if all(os.path.commonpath([os.path.realpath(here), place]) == os.path.realpath(here) for place in places):
        return here
    return os.path.commonpath(places)
