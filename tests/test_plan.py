"""Plan: every limit is enforced with a useful message, and TOML gives back what was put in."""

from __future__ import annotations

import errno
import inspect
import os
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout
from flatout.errors import PlanError, UsageError
from flatout.plan import PROVENANCE, Plan, _kinds, read_plan, write_plan
from flatout.plan_choices import SAME_BATCH, SCOPES, Exactness, choice_names, declared
from flatout.plan_document import SCHEMA

FULL = Plan(
    precision="bf16",
    compile="regional",
    loader_workers=4,
    persistent_workers=True,
    prefetch_factor=2,
    flush_denormals=True,
    reasons={"precision": "AMX multiplies bf16 8x faster here", "loader_workers": 'data is "37 %" of a step'},
    script="my train.py",
    argv=("--lr", "1e-3", "two words"),
    machine_fingerprint="f00d",
    machine_name="2 cores Xeon",
    torch_version="2.13.0",
    exactness="reduced",
    speedup=1.6,
    flops_per_step=2e9,
    warnings=("the clock varied by 8 %",),
    proved_reduced=("memory_format",),
)


def refused(**choices: Any) -> PlanError:
    with pytest.raises(PlanError) as caught:
        Plan(**choices)
    return caught.value


def refused_toml(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text, "mine.toml")
    return str(caught.value)


def _plans() -> st.SearchStrategy[Plan]:
    """Any plan: each field over its whole range, what contradicts left out."""

    def values(name: str) -> st.SearchStrategy[Any]:
        kind, limits = _kinds()[name], declared()[name]
        known = st.booleans() if kind is bool else st.integers(limits.low, limits.high) if kind is int else None
        return st.none() | (known if known is not None else st.sampled_from(kind))

    texts = st.none() | st.text()
    numbers = st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False)
    provenance = dict.fromkeys(PROVENANCE, texts) | {
        "argv": st.lists(st.text()).map(tuple),
        "sources": st.lists(st.text()).map(tuple),
        "warnings": st.lists(st.text()).map(tuple),
        "proved_reduced": st.lists(st.text()).map(tuple),
        "speedup": numbers,
        "flops_per_step": numbers,
        "exactness": st.sampled_from((None, *get_args(Exactness))),
    }
    return st.builds(
        _consistent, st.fixed_dictionaries({name: values(name) for name in choice_names()} | provenance), st.text()
    )


def _consistent(fields: dict[str, Any], reason: str) -> Plan:
    if not fields["loader_workers"]:
        fields |= {"persistent_workers": None, "prefetch_factor": None}
    else:
        fields |= {"fetch": None}
    if fields["fetch"] is None or fields["pin_memory"]:
        fields |= {"data_device": None}
    if fields["activation_checkpointing"] is None:
        fields |= {"checkpointed_blocks": None}
    all_gradients = (fields["micro_batches"] or 1) > 1 or fields["nonfinite"] or fields["precision"] == "fp16"
    if all_gradients or fields["zero_grad"]:
        fields |= {"optimizer_in_backward": None}
    if fields["parallel"] in (None, *SAME_BATCH):
        fields |= {"batch_norm": None}
    if fields["parallel"] not in ("ddp", "zero1"):
        fields |= {"gradient_compression": None, "ddp_bucket_mib": None, "ddp_static_graph": None}
    if fields["parallel"] != "fsdp":
        fields |= {"fsdp_dtype": None, "fsdp_keep_gathered": None, "fsdp_cpu_offload": None, "tensor_ranks": None}
    if fields["fsdp_cpu_offload"]:
        fields |= {"tensor_ranks": None}
    if fields["precision"] == "fp16":
        fields |= {"fsdp_cpu_offload": None}
    if (fields["micro_batches"] or 1) > 1 or fields["out_of_memory"] != "raise":
        fields |= {"ddp_static_graph": None}
    if fields["parallel"] in ("fsdp", *SAME_BATCH):
        whole = ("kernels", "loss", "activation_offload", "optimizer_in_backward", "optimizer_state")
        fields |= dict.fromkeys(whole)
    if fields["parallel"] == "zero1":
        fields |= {"optimizer_state": None}
    if fields["parallel"] == "dp":
        of_model = ("attention", "normalization", "kernels", "loss", "compile", "activation_offload")
        fields |= dict.fromkeys((*of_model, "activation_checkpointing", "checkpointed_blocks", "optimizer_in_backward"))
    if fields["weights"] != "int8":
        fields |= {"activations": None}
    fields |= {"arguments_digest": None} if fields["argv"] else {}
    return Plan(**fields, reasons={name: reason for name in choice_names() if fields[name] is not None})


@given(_plans())
@settings(max_examples=60, deadline=None)
def test_toml_gives_back_the_plan(plan: Plan) -> None:
    assert Plan.from_toml(plan.to_toml()) == plan


@given(st.text())
@settings(max_examples=150, deadline=None)
def test_any_text_is_a_plan_or_a_plan_error(text: str) -> None:
    try:
        Plan.from_toml(text)
    except PlanError as error:
        assert str(error).startswith("flatout.toml: ")  # noqa: PT017


def test_an_empty_plan_changes_nothing() -> None:
    assert Plan().choices() == {}
    assert Plan.from_toml("") == Plan(flatout_version=None)


def test_choices_come_in_the_order_of_declaration() -> None:
    assert list(FULL.choices()) == [
        "loader_workers",
        "persistent_workers",
        "prefetch_factor",
        "flush_denormals",
        "precision",
        "compile",
    ]
    assert Plan(loader_workers=0, pin_memory=False).choices() == {"loader_workers": 0, "pin_memory": False}


def test_every_choice_is_documented() -> None:
    assert all(len(one.meaning) > 20 for one in declared().values())


def test_a_plan_is_a_value() -> None:
    reasons = {"threads": "2 cores"}
    plan = Plan(threads=2, reasons=reasons)
    reasons["threads"] = "changed"
    assert plan.reasons == {"threads": "2 cores"}
    assert {plan: 1}[Plan(threads=2, reasons={"threads": "2 cores"})] == 1
    assert plan.flatout_version == flatout.__version__


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"precision": "bf61"}, "precision is 'bf61'; it must be 'fp32', 'bf16' or 'fp16'; did you mean 'bf16'?"),
        ({"precision": 16}, "precision is 16; it must be 'fp32', 'bf16' or 'fp16'; did you mean 'fp16'?"),
        ({"data_device": "tpu"}, "data_device is 'tpu'; it must be 'cuda'; remove it"),
        ({"loader_workers": True}, "loader_workers is True; it must be a whole number from 0 to 256"),
        ({"loader_workers": 2.0}, "loader_workers is 2.0; it must be a whole number from 0 to 256"),
        ({"loader_workers": -1}, "loader_workers is -1; it must be a whole number from 0 to 256"),
        ({"loader_workers": 257}, "loader_workers is 257; it must be a whole number from 0 to 256"),
        ({"prefetch_factor": 65, "loader_workers": 1}, "prefetch_factor is 65; it must be a whole number from 1 to 64"),
        ({"threads": 0}, "threads is 0; it must be a whole number from 1 to 1024"),
        ({"threads": 10**5000}, "threads is a very large int; it must be a whole number from 1 to 1024"),
        ({"pin_memory": 1}, "pin_memory is 1; it must be true or false"),
        ({"argv": "--lr"}, "argv is '--lr'; it must be a sequence of texts"),
        ({"script": 3}, "script is 3; it must be a text"),
        ({"speedup": float("nan")}, "speedup is nan; it must be a finite number above 0"),
        ({"speedup": True}, "speedup is True; it must be a finite number above 0"),
        (
            {"exactness": "round"},
            "exactness is 'round'; it must be 'bit-identical', 'rounding' or 'reduced'; did you mean ",
        ),
        ({"reasons": "fast"}, "reasons is 'fast'; it must map choices to texts"),
        ({"reasons": {"treads": "x"}}, "a plan has no choice 'treads'; there are device, "),
        ({"reasons": {"threads": "x"}}, "there is a reason for threads, which is not set; set threads or drop "),
        ({"reasons": {"threads": 4}, "threads": 2}, "the reason for threads is 4; it must be a text"),
    ],
)
def test_a_wrong_value_is_named_with_limit_and_remedy(choices: dict[str, Any], message: str) -> None:
    assert str(refused(**choices)).startswith(message)


@pytest.mark.parametrize(
    "choices",
    [
        {"persistent_workers": True},
        {"persistent_workers": True, "loader_workers": 0},
        {"prefetch_factor": 2},
        {"fetch": "batched", "loader_workers": 1},
        {"data_device": "cuda"},
        {"checkpointed_blocks": 2},
        {"activations": "int8"},
        {"optimizer_in_backward": True, "precision": "fp16"},
        {"optimizer_in_backward": True, "micro_batches": 2},
        {"data_device": "cuda", "fetch": "cached", "pin_memory": True},
    ],
)
def test_contradictions_name_both_sides_and_a_way_out(choices: dict[str, Any]) -> None:
    error = refused(**choices)
    assert next(iter(choices)) in error.what
    assert " while " in error.what
    assert error.limit
    assert error.remedy


def test_what_only_looks_contradictory_is_allowed() -> None:
    Plan(precision="fp16", matmul_precision="medium")
    Plan(persistent_workers=False, loader_workers=0, fetch="cached", data_device="cuda", pin_memory=False)


def test_what_a_choice_needs_is_carried_out_by_whoever_carries_out_that_choice() -> None:
    """Otherwise the part of a plan for one of them would be no plan."""
    for one in declared().values():
        needed = [rule.other for rule in one.requires if not rule.allows(None)]
        assert all(set(one.scopes) <= set(declared()[other].scopes) for other in needed)
        assert set(one.scopes) <= set(SCOPES)
        assert {*one.replaces, *one.pairs_with, *(rule.other for rule in one.requires)} <= set(declared())


@given(_plans(), st.sampled_from(list(SCOPES)))
@settings(max_examples=50)
def test_the_part_for_one_is_what_it_carries_out(plan: Plan, scope: Any) -> None:
    part = plan.part_for(scope)
    part.check_for(scope)
    assert part.choices() == {name: value for name, value in plan.choices().items() if scope in declared()[name].scopes}
    assert set(part.reasons) <= set(part.choices())


def test_a_choice_for_somebody_else_is_refused_by_name() -> None:
    plan = Plan(precision="bf16", micro_batches=4, fetch="batched", weights="int8")
    for scope, named in (
        ("generate", "fetch"),
        ("predict", "fetch"),
        ("script", "micro_batches"),
        ("step", "weights"),
    ):
        with pytest.raises(PlanError, match=rf"the plan's {named} is .*; {SCOPES[scope]} does not apply it"):
            plan.check_for(scope)
    with pytest.raises(PlanError, match=r"scope is \['step'\]"):
        plan.part_for(["step"])  # type: ignore[arg-type]
    plan.without("weights").check_for("step")  # the same plan goes to batches()
    plan.without("weights").check_for("batches")
    with pytest.raises(PlanError, match="scope is 'training'; it is 'script', 'step'"):
        plan.part_for("training")  # type: ignore[arg-type]


def test_with_choice_and_without_undo_each_other() -> None:
    plan = FULL.with_choice("threads", 2, "2 cores")
    assert plan.threads == 2
    assert plan.reasons["threads"] == "2 cores"
    assert plan.without("threads") == FULL
    assert FULL.threads is None
    assert FULL.without(*choice_names()).reasons == {}


def test_with_choice_names_a_slip() -> None:
    with pytest.raises(PlanError, match="did you mean 'precision'"):
        Plan().with_choice("presicion", "bf16", "")
    with pytest.raises(PlanError, match="use without"):
        Plan().with_choice("precision", None, "")
    with pytest.raises(PlanError, match="has no choice 'speedup'"):
        Plan().without("speedup")
    with pytest.raises(PlanError, match="needs worker processes"):
        FULL.without("loader_workers")


def test_mismatch_says_what_differs() -> None:
    assert FULL.mismatch("f00d", "2.13.0") is None
    assert FULL.mismatch("beef", "2.13.0") == "the plan was measured on another machine (2 cores Xeon)"
    assert FULL.mismatch("f00d", "2.14.0") == "the plan was measured with torch 2.13.0; here is 2.14.0"
    assert "does not say" in str(Plan().mismatch(None, None))


def test_the_document_reads_well() -> None:
    text = FULL.to_toml()
    assert "# next: flatout run 'my train.py' --lr 1e-3 'two words'\n" in text
    assert "# dtype of autocast regions; fp16 also scales the loss" in text
    assert list(tomllib.loads(text)) == ["schema", "plan", "reasons", "provenance"]
    assert "# next: flatout run -m a.b x\n" in Plan(script="-m a.b", argv=("x",)).to_toml()
    assert "# next: flatout run SCRIPT\n" in Plan(script="new\nline = 1").to_toml()


def test_a_name_that_is_not_unicode_does_not_stop_the_writing() -> None:
    assert Plan.from_toml(Plan(script="caf\udce9.py").to_toml()).script == "caf?.py"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[plan]\npresicion = 'bf16'", "unknown key 'presicion' in [plan]; did you mean 'precision'?"),
        ("[plan]\nspeedup = 2", "unknown key 'speedup' in [plan]; speedup belongs in [provenance]"),
        ("precision = 'bf16'", "unknown key 'precision' at the top level; precision belongs in [plan]"),
        ("[paln]", "unknown key 'paln' at the top level; did you mean 'plan'?"),
        ("plan = 3", "plan is 3; it must be a table; write [plan]"),
        ("[provenance]\nspeed = 2", "unknown key 'speed' in [provenance]; did you mean 'speedup'?"),
        ("[plan]\nprecision = ", "not TOML: Invalid value (at line 2, column 13); correct that line, or tune again"),
        ("[plan]\nthreads = 1\nthreads = 2", "not TOML: Cannot overwrite a value (at line 3"),
        ("a = " + "[" * 5000, "not TOML: "),
        ("a = " + "1" * 5000, "not TOML: "),
        ("[plan]\nthreads = 0x" + "f" * 5000, "threads is a very large int; it must be"),
        (
            f"schema = {SCHEMA + 1}",
            f"schema is {SCHEMA + 1}; Flatout {flatout.__version__} reads up to {SCHEMA}; update",
        ),
        ("schema = true", "schema is True; it must be a whole number"),
        ("[plan]\npersistent_workers = true", "persistent_workers is true while loader_workers is unset; "),
    ],
)
def test_a_slip_in_the_file_is_named(text: str, message: str) -> None:
    assert refused_toml(text).startswith(f"mine.toml: {message}")


OLD = """
schema = 1
[plan]
precision = "bf16"
accumulate = 4
[reasons]
accumulate = "memory"
"""


def test_a_file_of_schema_1_is_migrated() -> None:
    plan = Plan.from_toml(OLD)
    assert plan.choices() == {"precision": "bf16", "micro_batches": 4}
    assert plan.reasons == {"micro_batches": "memory"}
    assert tomllib.loads(plan.to_toml())["schema"] == SCHEMA
    assert Plan.from_toml(plan.to_toml()) == plan
    assert Plan.from_toml("schema = 1\n[plan]\nthreads = 2").threads == 2


@pytest.mark.parametrize("schema", [1, 2, 3, 4])
def test_a_former_name_of_an_exactness_is_read(schema: int) -> None:
    plan = Plan.from_toml(f'schema = {schema}\n[provenance]\nexactness = "bit-same"')
    assert plan.exactness == "bit-identical"
    assert 'exactness = "bit-identical"' in plan.to_toml()


@pytest.mark.parametrize("schema", range(1, SCHEMA + 1))
def test_a_former_value_of_kernels_is_read_as_what_it_is_called_now(schema: int) -> None:
    assert Plan.from_toml(f'schema = {schema}\n[plan]\nkernels = "amx"').kernels == "bf16"


@pytest.mark.parametrize("table", ["plan", "reasons"])
def test_a_name_of_another_schema_is_refused(table: str) -> None:
    new = f"schema = 1\n[{table}]\nmicro_batches = 4"
    assert refused_toml(new) == (
        f"mine.toml: unknown key 'micro_batches' in [{table}]; schema 1 called it 'accumulate'; write schema = 2"
    )
    for old in (f"schema = 2\n[{table}]\naccumulate = 4", f"[{table}]\naccumulate = 4"):
        assert refused_toml(old) == (
            f"mine.toml: unknown key 'accumulate' in [{table}]; since schema 2 it is 'micro_batches'; "
            "rename it, or write schema = 1 if the file is that old"
        )


def test_an_unknown_argument_names_the_right_one() -> None:
    assert str(refused(accumulate=4)).endswith("its name is 'micro_batches'")
    assert str(refused(precison="bf16")).endswith("did you mean 'precision'?")
    with pytest.raises(PlanError, match=r"Plan got 'flatout.toml'; choices are given by name; .*read_plan"):
        Plan("flatout.toml")  # type: ignore[misc]


def test_help_explains_every_choice() -> None:
    text = inspect.getdoc(Plan) or ""
    for name in choice_names():
        assert f"\n{name}: " in text
        assert declared()[name].meaning in text
    assert "micro_batches: a whole number from 1 to 65536\n" in text
    assert "precision" in inspect.signature(Plan).parameters


def test_files_are_written_whole_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "flatout.toml"
    write_plan(path, Plan())
    write_plan(path, FULL, include_private=True)
    assert read_plan(path) == FULL
    assert os.listdir(tmp_path) == ["flatout.toml"]
    path.write_bytes(b"\xef\xbb\xbf[plan]\r\nthreads = 2\r\n")  # as an editor on Windows saves it
    assert read_plan(path).threads == 2


def test_a_link_to_a_plan_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.toml").symlink_to("plan.toml")
    write_plan(tmp_path / "link.toml", FULL, include_private=True)
    assert (tmp_path / "link.toml").is_symlink()
    assert read_plan(tmp_path / "plan.toml") == FULL


def test_a_full_disk_leaves_the_old_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "flatout.toml"
    write_plan(path, FULL, include_private=True)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device; free some space"):
        write_plan(path, Plan())
    assert read_plan(path) == FULL
    assert os.listdir(tmp_path) == ["flatout.toml"]


def test_an_unusable_path_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no plan at .*absent.toml; make one with: flatout tune SCRIPT"):
        read_plan(tmp_path / "absent.toml")
    (tmp_path / "cut.toml").write_text("\n")
    with pytest.raises(PlanError, match=r"the plan .*cut.toml is empty; one without choices has a line \[plan\]"):
        read_plan(tmp_path / "cut.toml")
    with pytest.raises(UsageError, match="Is a directory"):
        read_plan(tmp_path)
    with pytest.raises(UsageError, match="No such file or directory; name a place you may write"):
        write_plan(tmp_path / "absent" / "flatout.toml", FULL)
    with pytest.raises(UsageError, match="cannot write the plan"):
        write_plan(tmp_path, FULL)
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9")
    with pytest.raises(PlanError, match=r"latin.toml: byte 5 is 0xe9; a plan is UTF-8 text"):
        read_plan(tmp_path / "latin.toml")
