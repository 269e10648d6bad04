"""The page: one file that needs nothing else, loads nothing and runs no script.

Everything of a document is escaped by Jinja's autoescape. A content security policy that allows only this page's own
styles, by their hash, stands behind it: even what slipped through could neither run nor load anything.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import BaseLoader, Environment, StrictUndefined, Template
from markupsafe import Markup

from flatout import __version__
from flatout.errors import UsageError
from flatout.report.document import Document
from flatout.report.html.blocks import Section
from flatout.report.html.finding_section import findings
from flatout.report.html.machine_sections import machine, reproduce
from flatout.report.html.memory_section import memory
from flatout.report.html.profile_sections import profile, roofline
from flatout.report.html.rank_section import ranks
from flatout.report.html.reading import Part, Sources
from flatout.report.html.step_sections import before_after, step
from flatout.report.html.trial_section import strategies, trials
from flatout.report.html.verdicts import verdict

KINDS = ("tune", "strategies", "run", "profile", "memory")
_POLICY = "default-src 'none'; style-src '{style}'; base-uri 'none'; form-action 'none'"


def report_html(documents: Sequence[tuple[Path, Document]]) -> str:
    """One page of the documents of one subject, at most one of each kind. UsageError where one is malformed."""
    sources = _sources(documents)
    files = {str(doc["flatout"]["document"]): path.name for path, doc in documents}
    ordered = [
        before_after(sources),
        strategies(sources),
        step(sources),
        ranks(sources),
        memory(sources),
        roofline(sources),
        profile(sources),
        findings(sources),
        trials(sources),
        machine(sources),
        reproduce(sources, files),
    ]
    sections = [section for section in ordered if section is not None]
    style = _data("style.css")
    return _template().render(
        policy=_POLICY.format(style=_style_hash(style)),
        style=Markup(style),
        subject=_subject(sources),
        kinds=[kind for kind in KINDS if kind in sources],
        machine=_machine_line(sources),
        verdict=verdict(sources),
        problems=_counted(sections),
        sections=sections,
        version=__version__,
    )


def _sources(documents: Sequence[tuple[Path, Document]]) -> Sources:
    found: dict[str, Part] = {}
    names: dict[str, Path] = {}
    for path, doc in documents:
        kind = str(doc["flatout"].get("document"))
        if kind not in KINDS:
            raise UsageError(f"{path} is a {kind!r} document", limit=f"a report shows documents of {', '.join(KINDS)}")
        if kind in found:
            raise UsageError(
                f"{path} is another {kind!r}",
                limit="a report shows one of each kind",
                remedy="flatout compare shows two",
            )
        found[kind] = Part(doc, path.name)
        name = _name(found[kind])
        other = next((one for one in names if os.path.normpath(one) != os.path.normpath(name)), None)
        if name and other is not None:
            raise UsageError(f"{path} is of {name}, {names[other]} of {other}", limit="a report is about one script")
        if name:
            names[name] = path
    return Sources({kind: found[kind] for kind in KINDS if kind in found})


def _subject(sources: Sources) -> str:
    return next((name for name in map(_name, sources.values()) if name), "A training step")


def _name(doc: Part) -> str:
    """Of the script, the model's class of a training step, or the function that was profiled or that made the step."""
    return (
        doc.at("script").text("name")
        or doc.at("step").text("model")
        or doc.at("profile").text("name")
        or doc.text("spec")
    )


def _machine_line(sources: Sources) -> str:
    one = next((doc.at("machine") for doc in sources.values() if doc.at("machine")), None)
    if one is None:
        return ""
    gpus = [gpu.text("name") for gpu in one.parts("devices")]
    cores = one.at("cpu").number("available_cores")
    cpu = one.at("cpu").text("name") + (f", {cores:.0f} cores" if cores else "")
    torch = one.at("versions").text("torch")
    return " · ".join([*gpus, cpu, *([f"torch {torch}"] if torch else [])])


def _counted(sections: Sequence[Section]) -> str:
    """'3 findings, 1 of them serious', '1 serious finding'; '' where there are none."""
    severities = [getattr(block, "severity", "") for one in sections if one.id == "findings" for block in one.blocks]
    serious = sum(one in ("warning", "unusable") for one in severities)
    if not severities:
        return ""
    kind = "serious finding" if serious == len(severities) else "finding"
    counted = f"{len(severities)} {kind}{'' if len(severities) == 1 else 's'}"
    return f"{counted}, {serious} of them serious" if 0 < serious < len(severities) else counted


@functools.cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, loader=BaseLoader(), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.from_string(_data("report.html.j2"))


@functools.cache
def _data(name: str) -> str:
    return resources.files("flatout.report.html").joinpath(name).read_text(encoding="utf-8")


def _style_hash(style: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
