from pathlib import Path

import pytest

from flatout import environment


def test_the_cache_has_one_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("FLATOUT_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert environment.cache_dir() == Path("/home/me/.cache/flatout")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert environment.cache_dir() == Path("/x/flatout")
    monkeypatch.setenv("FLATOUT_CACHE_DIR", "/own")
    assert environment.cache_dir() == Path("/own")


def test_runs_keep_their_state_in_memory_where_the_user_has_such_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLATOUT_RUNS_DIR", "/own")
    assert environment.runs_dir() == Path("/own")
    monkeypatch.delenv("FLATOUT_RUNS_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert environment.runs_dir() == tmp_path / "flatout-runs"
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    for missing in (str(tmp_path / "gone"), ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", missing)
        assert environment.runs_dir().name.startswith("flatout-runs-")


@pytest.mark.parametrize(("text", "keeps"), [(None, True), ("", True), ("1", False)])
def test_a_user_may_want_no_history(monkeypatch: pytest.MonkeyPatch, text: str | None, keeps: bool) -> None:
    monkeypatch.delenv("FLATOUT_NO_HISTORY")
    if text is not None:
        monkeypatch.setenv("FLATOUT_NO_HISTORY", text)
    assert environment.keeps_history() is keeps


@pytest.mark.parametrize(
    ("text", "threads"), [("4", 4), ("4,2", 4), ("", None), ("many", None), ("-1", None), ("0", None)]
)
def test_thread_counts(monkeypatch: pytest.MonkeyPatch, text: str, threads: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert environment.omp_num_threads() == threads


def test_unset_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert environment.visible_cuda_devices() is None
    assert environment.omp_num_threads() is None
    assert environment.rank() is None
    assert environment.cpp_compiler() == "g++"


def test_a_trial_has_a_fixed_hash_order_and_its_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    made = environment.trial_environment({"LD_PRELOAD": "x.so"})
    assert made["PYTHONHASHSEED"] == "0"
    assert made["LD_PRELOAD"] == "x.so"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert environment.trial_environment({})["PYTHONHASHSEED"] == "7"


def test_an_environment_that_a_script_gives_a_process_is_followed_once() -> None:
    given = {"PATH": "/bin", "PYTHONPATH": "/mine"}
    found = environment.with_following(given, "/hook", "/records")
    assert found == {"PATH": "/bin", "PYTHONPATH": "/hook:/mine", environment.FOLLOWED_INTO: "/records"}
    assert environment.with_following(found, "/hook", "/records") == found
    assert environment.with_following({}, "/hook", "/records")["PYTHONPATH"] == "/hook"
    here = environment.with_following({"PYTHONPATH": ":/libs"}, "/hook", "/records")
    assert here["PYTHONPATH"] == "/hook::/libs"  # an empty entry is the current folder


@pytest.mark.parametrize("text", [None, "2"])
def test_the_profiler_is_quiet_unless_the_user_has_said_how_much_it_logs(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    if text is not None:
        monkeypatch.setenv("KINETO_LOG_LEVEL", text)
    with environment.quiet_profiler():
        assert environment.variables()["KINETO_LOG_LEVEL"] == (text or "6")
    assert environment.variables().get("KINETO_LOG_LEVEL") == text


def test_a_cache_that_cannot_be_made_is_not_given_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes the folder with the first optimizer: the script would fail there."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "file"))
    assert environment.inductor_cache() == {}
    assert "TORCHINDUCTOR_CACHE_DIR" not in environment.trial_environment({})
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "folder"))
    assert environment.inductor_cache() == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "folder" / "inductor")}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/the/users")
    assert environment.inductor_cache() == {"TORCHINDUCTOR_CACHE_DIR": "/the/users"}
