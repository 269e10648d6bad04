"""The HTML report: what it says, that it is well formed, accessible and self-contained; hostile texts stay texts."""

from __future__ import annotations

import base64
import copy
import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import UsageError
from flatout.report.html.page import report_html
from flatout.report.html.reading import Part
from flatout.report.html.verdicts import verdict
from tests.report.html.documents import EVERYTHING, FINDING, MEMORY, PROFILE, RUN, STRATEGIES, TUNE, recorded

VOID = {"meta"}
HOSTILE = (
    "</style></title></svg><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}\"'`&#60;\x00\x1b[31m\ud800"
)


class Page(HTMLParser):
    """Its elements in order, with their attributes; fails where they do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def rendered(documents: Mapping[str, Any]) -> str:
    return report_html([(Path(f"{kind}.json"), doc) for kind, doc in documents.items()])


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(rendered(EVERYTHING))


@pytest.mark.parametrize("kind", ["tune", "run", "memory"])
def test_documents_of_earlier_versions_are_shown(kind: str) -> None:
    found = Page(rendered({kind: recorded(kind)}))
    assert "train.py" in found.text
    assert "How to reproduce this" in found.text


def test_the_verdict_comes_first(page: Page) -> None:
    headings = [attributes for tag, attributes in page.elements if tag == "h2"]
    assert headings[0]["class"] == "headline good"
    assert page.text.index("1.44 times as fast") < page.text.index("Before and after")
    assert "peak of the process 1 GiB → 1.5 GiB" in page.text
    said = " ".join(page.text.split())
    for expected in (
        "12.3 ms → 8.5 ms a step, 95 % interval ×1.40 to ×1.48, 8 pairs",
        "bit-identical over 40 steps, 2.5 epochs",
        "a step's tensors take 2 GiB → 512 MiB, within 1 GiB",
        "×1.32 over 1,000 steps, start-up included",
        "Ran out of memory at train.py:30",
        "4 KiB more is held after each step",
        "2 findings, 1 of them serious",
        "Caution: run: unstable: the middle half spreads over 28% of the median",
        "Caution: run: a warning",
    ):
        assert expected in said


@pytest.mark.parametrize(
    ("changes", "headline", "detail"),
    [
        ({"steps": 0}, "30 ms a step", "training in 2 processes that it started"),
        (
            {"steps": 0, "processes": [], "measurement": None, "observed": None},
            "No training step was found",
            "no training step was found",
        ),
        ({"script": {"name": "train.py", "status": None}}, "a step", "; the script was still running when this was"),
        ({"script": {"name": "train.py", "status": 3}}, "The script ended with exit code 3", "40 steps"),
    ],
)
def test_the_verdict_on_a_run(changes: dict[str, Any], headline: str, detail: str) -> None:
    found = verdict({"run": Part({**RUN, "out_of_memory": None, **changes}, "run")})
    assert headline in found.headline
    assert detail in found.detail


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"ceiling_share": 0.25, "ceiling": "bf16 ceiling (2 TFLOP/s)"}, "25% of the bf16 ceiling (2 TFLOP/s)"),
        ({"ceiling_share": None, "ceiling": "unknown: torch.compile"}, "unknown torch.compile"),
    ],
)
def test_the_share_of_the_ceiling_is_the_documents(changes: dict[str, Any], shown: str) -> None:
    found = Page(rendered({"run": {**RUN, **changes}}))
    assert f"share of the ceiling {shown}" in " ".join(found.text.split())


def test_what_a_run_did_between_steps_and_whether_it_had_a_plan() -> None:
    outside = {"before_seconds": 4.0, "pauses": 1, "pause_seconds": 0.5, "after_seconds": 0.1}
    text = " ".join(Page(rendered({"run": {**RUN, "outside_of_steps": outside, "plan": {}}})).text.split())
    assert "1 pause: evaluation, checkpoints, plots" in text
    assert "Run it by its plan" not in text
    assert "Run it by its plan" in Page(rendered({"run": {**RUN, "plan": {"threads": 1}}})).text


def test_the_peak_of_memory_and_what_is_certain_of_a_saving() -> None:
    peak = {"size_bytes": 4096, "step": 4, "phase": "forward", "line": "train.py:30", "categories": {"weights": 4096}}
    saving = {"measure": "freed", "certainty": "at most", "held_bytes": 1024, "how": ""}
    use = {**MEMORY["use"], "peak": {**MEMORY["use"]["peak"], **peak}, "savings": [saving]}
    text = " ".join(Page(rendered({"memory": {**MEMORY, "use": use}})).text.split())
    assert text.count("in step 4, forward") == 2  # in the verdict and above the categories
    assert "freed 1 KiB at most unknown" in text


def test_each_part_of_the_documents_is_there(page: Page) -> None:
    for expected in (
        "waiting for data",
        "Time of a step over the run: 20 samples",
        "print(loss.item())",
        "If it is wrong: the loss is printed less often",
        "aten::addmm",
        "5 more rows: operators",
        "history.append(loss)",
        "no compiler was found",
        "moved to the GPU",
        "Intel(R) Xeon(R) Processor",
        "flatout run train.py ARGUMENTS",
        "batched_fetch = true",
        "samples a second",
        "float32 is not supported",
        "Waits for the GPU",
        "train.py:23",
        "rank 1",
        "not completed: it was killed, or still ran",
        "Slowest: rank 1, 30 ms a step; fastest: rank 0, 20 ms.",
    ):
        assert expected in page.text, expected


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("~/my nets/train.py", "flatout profile ~/'my nets/train.py'"),  # in quotes, ~ is no home directory
        ("my nets/train.py", "flatout profile 'my nets/train.py'"),
        ("-m nets.train", "flatout profile -m nets.train"),
    ],
)
def test_the_command_that_reproduces_it_is_one_for_a_shell(name: str, command: str) -> None:
    assert command in Page(rendered({"profile": PROFILE | {"script": {"name": name, "arguments": []}}})).text


@pytest.mark.parametrize(
    ("severities", "counted"),
    [
        (["warning"], "1 serious finding"),
        (["warning", "unusable"], "2 serious findings"),
        (["warning", "note"], "2 findings, 1 of them serious"),
        (["note"], "1 finding"),
    ],
)
def test_findings_are_counted(severities: list[str], counted: str) -> None:
    findings = [FINDING | {"severity": one, "title": one} for one in severities]
    html = rendered({"profile": PROFILE | {"findings": findings}})
    assert f">{counted}<" in html


def test_ranks_and_what_they_wait_for() -> None:
    balance = {
        "straggler": "rank 1",
        "own_seconds": 0.03,
        "next_seconds": 0.02,
        "excess_seconds": 0.01,
        "part": "data",
        "part_excess_seconds": 0.009,
        "waited_seconds": 0.01,
        "exposed_seconds": 0.004,
        "turns_seconds": 0.002,
        "imbalance": 1.2,
        "step_seconds": 0.04,
        "certain": True,
    }
    text = Page(rendered({"run": RUN | {"rank_balance": balance}})).text
    for expected in (
        "4 ms (20%)",
        "A step of each process",
        "communication that nothing overlaps 4 ms of a step (10%)",
        "ranks that are late in turns 2 ms of a step (5.0%)",
        "rank 1: 10 ms of a step (25%)",
        "9 ms more than the others in: waiting for data",
        "×1.20",
    ):
        assert expected in text, expected
    assert "Slowest: rank 1" not in text
    unknown = RUN | {"rank_balance": None, "rank_balance_unknown_because": "unknown, because it was killed"}
    assert (
        "How long ranks wait for each other: unknown, because it was killed." in Page(rendered({"run": unknown})).text
    )


def test_what_ranks_of_a_profile_exchange() -> None:
    exchanged = {
        "total_seconds": 0.005,
        "exposed_seconds": 0.002,
        "overlapped_seconds": None,
        "collectives": [{"name": "gloo:all_reduce", "calls": 2.0, "seconds": 0.006}],
    }
    profiles = [
        {"name": "rank 0", "profile": {"communication": exchanged}, "fault": None},
        {"name": "rank 1", "profile": None, "fault": "it died"},
    ]
    ranks = {"processes": RUN["processes"], "rank_profiles": profiles, "rank_notes": ["1 of 2 ranks were profiled"]}
    text = Page(rendered({"profile": PROFILE | ranks})).text
    assert "rank 0 5 ms 2 ms unknown 2 × gloo:all_reduce, 6 ms" in text
    assert "1 of 2 ranks were profiled." in text


def test_the_memory_of_each_rank_is_in_a_table_and_a_leak_of_one_in_the_verdict() -> None:
    leak = {"holder": "kept", "line": "train.py:17", "bytes_per_step": 16384.0}
    first = {**MEMORY, "name": "rank 0", "fault": None, "leaks": {"verdict": "steady", "leaks": []}}
    second = {**first, "name": "rank 1", "leaks": {"verdict": "leaks", "leaks": [leak]}}
    text = Page(
        rendered({"memory": {**MEMORY, "leaks": first["leaks"], "shown_rank": "rank 0", "ranks": [first, second]}})
    ).text
    assert "Memory of each process that trained; what follows is of rank 0" in text
    assert "leaks in rank 1" in text
    assert re.search(r"rank 1 [\d.]+ \w+ [\d.]+ \w+ [\d.]+ \w+ train.py:17", text)


def test_a_choice_of_strategies_is_shown_predicted_beside_measured() -> None:
    text = Page(rendered({"strategies": STRATEGIES})).text
    assert "1.12 times as fast with ddp on 2 ranks" in text
    assert "300 ms → 268 ms a step" in text
    assert "equal to rounding over 30 steps" in text
    assert "ddp 268 ms ×1.12 1.05 to 1.19 250 ms half of the batch in each rank 152 MiB measured kept" in text
    assert "tensor not timed not timed unknown there are forecasts for ddp and fsdp alone refused" in text
    assert "flatout tune --devices 2 net.py:make" in text
    assert 'parallel = "ddp"' in text


def test_a_choice_that_stays_with_one_process_says_why() -> None:
    none = {**STRATEGIES, "chosen": None, "reason": "no strategy was faster than one process", "comparison": None}
    text = Page(rendered({"strategies": {**none, "proof": None, "plan": {}}})).text
    assert "No strategy was faster than one process A step of one process takes 300 ms" in text


def test_one_finding_of_two_documents_is_shown_once(page: Page) -> None:
    assert page.text.count(str(FINDING["title"])) == 1


def test_it_loads_nothing_and_runs_nothing(page: Page) -> None:
    forbidden = {"script", "link", "img", "iframe", "object", "embed", "form", "base", "image", "use", "audio", "video"}
    assert forbidden & set(page.tags) == set()
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name not in ("style", "src", "srcset", "background", "ping", "formaction")
            assert name != "href" or value.startswith("#"), tag
            assert not re.search(r"https?:|javascript:|data:|url\(", value), (tag, name, value)
    html = rendered(EVERYTHING)
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    assert style is not None
    assert not re.search(r"url\(|@import|https?:", style[1])
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = next(attributes["content"] for tag, attributes in page.elements if "http-equiv" in attributes)
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_it_can_be_read_without_eyes_or_mouse(page: Page) -> None:
    assert page.tags.count("h1") == page.tags.count("main") == page.tags.count("nav") == 1
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.elements:
        if tag == "svg":
            assert attributes.get("aria-hidden") == "true" or (attributes["role"] == "img" and attributes["aria-label"])
        if tag == "th":
            assert attributes["scope"] in ("col", "row")
        if tag == "a":
            assert attributes["href"][1:] in ids
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in ids
        if tag == "html":
            assert attributes["lang"] == "en"
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links[0] == "#verdict"
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in pairwise(levels))


@pytest.mark.parametrize("documents", [EVERYTHING, {"strategies": STRATEGIES}], ids=["script", "step"])
def test_hostile_texts_change_nothing_of_the_structure(documents: dict[str, Any]) -> None:
    """Every text of every document, names of parts too, is one that tries to become HTML."""
    plain, hostile = (Page(rendered(_with_texts(documents, word))) for word in ("x" * len(HOSTILE), HOSTILE))
    assert hostile.tags == plain.tags
    names = [[sorted(attributes) for _, attributes in one.elements] for one in (hostile, plain)]
    assert names[0] == names[1]
    assert HOSTILE.replace("\x00", "\ufffd").replace("\x1b", "\ufffd").replace("\ud800", "\ufffd") in hostile.text
    assert rendered(_with_texts(documents, HOSTILE)).encode()  # a lone surrogate would fail


KEPT = {"document", "verdict", "outcome", "severity", "confidence", "device", "bound", "fingerprint"}
"""Decide what is shown at all."""


def _with_texts(value: Any, text: str, key: str = "") -> Any:
    if isinstance(value, dict):
        free = key in ("categories", "reasons", "plan", "plan_change")
        return {(f"{text}{name}" if free else name): _with_texts(inner, text, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_texts(one, text, key) for one in value]
    return f"{text}" if isinstance(value, str) and key not in KEPT else value


def test_a_severity_of_another_version_is_no_class() -> None:
    doc = {**RUN, "findings": [{**FINDING, "severity": "evil headline"}]}
    found = Page(rendered({"run": doc}))
    assert [attributes["class"] for tag, attributes in found.elements if tag == "article"] == ["problem is-note"]


@pytest.mark.parametrize(
    "value", [None, "x", -1, 0, 1e300, 10**400, [], {}, True, [1], {"a": "b"}, float("nan")], ids=repr
)
def test_a_value_of_any_kind_is_shown_or_refused(value: Any) -> None:
    """A document that somebody edited is never a traceback."""
    rng = random.Random(repr(value))
    documents = {**EVERYTHING, "strategies": STRATEGIES}
    kinds = list(documents)
    for _ in range(25):
        kind = rng.choice(kinds)
        doc = copy.deepcopy(documents[kind])
        places = [place for place in _places(doc) if place[0] != "flatout"]
        *path, last = rng.choice(places)
        inside = doc
        for key in path:
            inside = inside[key]
        inside[last] = value
        refusal = ""
        try:
            Page(rendered({kind: doc}))
        except UsageError as error:
            refusal = str(error)
        assert not refusal or refusal.startswith(f"{kind}.json."), (kind, path, last)


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all values."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (key,)
        yield from ((key, *rest) for rest in _places(inner))


@pytest.mark.parametrize("value", [1.7e308, 1e250])
def test_a_number_that_overflows_in_a_chart_is_refused(value: float) -> None:
    memory = [{"step": at, "peak_bytes": value, "held_bytes": 1} for at in (1, 2, 3)]
    with pytest.raises(UsageError, match=r"run.json.memory\[0\].peak_bytes is .* a finite number is needed there"):
        rendered({"run": {**RUN, "memory": memory}})


def test_commands_run_a_module_as_a_module() -> None:
    found = Page(rendered({"run": {**RUN, "script": {"name": "-m package.train", "arguments": ["--lr", "a b"]}}}))
    assert "flatout run -m package.train --lr 'a b'" in found.text


def test_a_document_whose_files_name_is_no_utf8_is_shown() -> None:
    assert report_html([(Path("caf\udce9.json"), RUN)]).encode()


def test_what_does_not_belong_together_is_refused() -> None:
    other = {**MEMORY, "script": {"name": "other.py"}}
    with pytest.raises(
        UsageError, match=r"memory\.json is of other\.py, run\.json of train.py; a report is about one script"
    ):
        rendered({"run": RUN, "memory": other})
    rendered({"run": RUN, "memory": {**MEMORY, "script": {"name": "./train.py"}}})  # the same script
    with pytest.raises(UsageError, match=r"b\.json is another 'run'; a report shows one of each kind; flatout compare"):
        report_html([(Path("a.json"), RUN), (Path("b.json"), RUN)])
    with pytest.raises(
        UsageError, match=r"check\.json is a 'check' document; a report shows documents of tune, strategies, run"
    ):
        rendered({"check": recorded("check")})


def test_documents_of_different_machines_are_not_shown_as_one() -> None:
    elsewhere = {**PROFILE, "machine": {**PROFILE["machine"], "fingerprint": "other"}}
    assert "different machines" in Page(rendered({"run": RUN, "profile": elsewhere})).text


def test_a_tune_without_a_gain_says_why() -> None:
    found = Page(rendered({"tune": recorded("tune")}))
    assert "Nothing helps here" in found.text
    assert "Before and after" not in found.text


def on_devices(chosen: int) -> dict[str, Any]:
    """What a tune leaves that was asked for several devices."""
    comparison = {"ratio": 1.6, "low": 1.5, "high": 1.7, "verdict": "faster", "pairs": 24}
    told = {"devices": 2, "least": 1.2, "expected": 1.5, "most": 1.9, "step_seconds": 0.06, "reason": "half the batch"}
    trial = {"devices": 2, "outcome": "kept", "reason": "faster", "predicted": told, "comparison": comparison}
    return {
        **TUNE,
        "devices": {
            "chosen": chosen,
            "reason": "" if chosen > 1 else "one device is faster here",
            "trials": [{**trial, "baseline_seconds": 0.1, "candidate_seconds": 0.0625}],
            "comparison": comparison,
            "baseline_seconds": 0.1,
            "candidate_seconds": 0.0625,
            "proof": {"verdict": "equal to rounding", "steps": 40},
        },
    }


def test_several_devices_that_were_chosen_are_the_verdict() -> None:
    text = Page(rendered({"tune": on_devices(2)})).text
    assert "1.60 times as fast on 2 devices" in text
    assert "equal to rounding over 40 steps" in text
    assert "×1.20 to ×1.90" in text


def test_one_device_that_was_chosen_keeps_its_own_verdict() -> None:
    text = Page(rendered({"tune": on_devices(1)})).text
    assert "on 2 devices" not in text
    assert "one device is faster here" in text


def test_large_documents_make_a_small_page() -> None:
    """A long run and an endless profile: the charts are thinned, and tables end where nobody reads on."""
    rng = random.Random(0)
    samples = [0.01 * rng.lognormvariate(0, 0.3) for _ in range(4096)]
    run = {**RUN, "measurement": {**RUN["measurement"], "samples_seconds": samples}, "steps": 131_072}
    run["memory"] = [{"step": at, "peak_bytes": at * 1000, "held_bytes": at * 900} for at in range(1, 4096)]
    long = "x" * 100_000
    profile = {**PROFILE["profile"], "operators": [{"name": long, "seconds": 0.1, "calls": 1.0}] * 5000}
    html = rendered({"tune": TUNE, "run": run, "profile": {**PROFILE, "profile": profile}, "memory": MEMORY})
    assert len(html) < 2_000_000
    assert "and 4,900 more in the document" in html
    assert "4,096 samples, evenly taken" in html
