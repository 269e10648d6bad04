"""A script under `flatout run` cannot tell, and its reader neither: output, traceback, exit status, surroundings."""

from __future__ import annotations

import json
import os
import py_compile
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import ScriptError, UsageError
from flatout.script.entry import Target

SURROUNDINGS = """
    import sys
    print(__file__, sys.argv, sys.path[0], sys.orig_argv[1:])
    print(type(__builtins__), __name__, __package__, __spec__ and __spec__.name, type(__loader__), __cached__)
    print(sorted(name for name in globals() if name.startswith('__')), sys.modules['__main__'].__dict__ is globals())
"""

SCRIPTS = {
    "exit code": "import sys; print('out'); sys.exit(3)",
    "exit text": "import sys; sys.exit('a reason')",
    "exit negative": "import sys; sys.exit(-1)",
    "another program": "import os; print('a', flush=True); os.execvp('sh', ['sh', '-c', 'cat; echo b >&2; exit 4'])",
    "exit nothing": "import sys; sys.exit()",
    "exit object": "import sys; sys.exit([1, 2])",
    "exit text into a closed stream": "import sys; sys.stderr.close(); sys.exit('a reason')",
    "exit text without a stream": "import sys; sys.stderr = None; sys.exit('a reason')",
    "exit object without a text": """
        import sys
        class Silent:
            def __str__(self):
                raise ValueError('no text')
        sys.exit(Silent())
    """,
    "exit code that C cannot hold": "import sys; sys.exit(2**70)",
    "syntax": "print(1)\nif True:\n  x = (\n",
    "tabs": "if True:\n\tx = 1\n        y = 2\n",
    "import of what is not there": "import nowhere_to_be_found",
    "raise at step 7": """
        def train():
            for step in range(10):
                if step == 7:
                    raise RuntimeError(f"step {step}")
                print(step)
        train()
    """,
    "chain": """
        try:
            {}['a']
        except KeyError as error:
            raise ValueError('worse') from error
    """,
    "group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "own hook": "import sys; sys.excepthook = lambda kind, error, trace: print('hook', error); raise ValueError(1)",
    "hook that fails": """
        import sys
        def hook(kind, error, trace):
            raise TypeError('in the hook')
        sys.excepthook = hook
        raise ValueError(1)
    """,
    "no hook": "import sys; del sys.excepthook; raise ValueError(1)",
    "hook that is interrupted": """
        import sys
        def hook(kind, error, trace):
            raise KeyboardInterrupt
        sys.excepthook = hook
        raise ValueError(1)
    """,
    "interrupt of a class of its own": "class Stopped(KeyboardInterrupt): pass\nraise Stopped('enough')",
    "last exception": """
        import atexit, sys
        atexit.register(lambda: print(sys.last_type, sys.last_value))
        raise ValueError(1)
    """,
    "stdin": "import sys; print(sys.stdin.readline(), input(), sys.stdin.read().upper())",
    "threads and exit handlers": """
        import atexit, threading
        atexit.register(print, 'handler 1')
        atexit.register(print, 'handler 2')
        main_over = threading.Event()
        def work():
            threading.main_thread().join()
            print('thread ends')
        threading.Thread(target=work).start()
        print('main ends')
    """,
    "pickle": """
        import pickle, copy
        class Thing:
            def __init__(self): self.value = 3
        print(pickle.loads(pickle.dumps(Thing())).value, Thing.__module__, pickle.dumps(Thing()))
    """,
    "processes": """
        import multiprocessing, os
        def square(x):
            return x * x, __name__
        class Item:
            def __init__(self, x): self.x = x
        def unwrap(item):
            return item.x
        if __name__ == '__main__':
            for method in ('spawn', 'fork'):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(square, [1, 2]), pool.map(unwrap, [Item(3)]))
            child = os.fork()
            if child == 0:
                raise SystemExit(5)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """,
    "environment": "import os, sys; print(sorted(os.environ.items())); print(sys.flags, sys.warnoptions, os.getcwd())",
    "deprecated": "import warnings; warnings.warn('old', DeprecationWarning)",
    "closed streams": "import sys; print('a'); sys.stdout.flush(); sys.stdout.close(); sys.stderr.close()",
    "bytes": "import sys; sys.stdout.buffer.write(bytes(range(128, 138)).decode('latin1').encode()); print('\\u00e9')",
}


@pytest.mark.parametrize("source", SCRIPTS.values(), ids=SCRIPTS.keys())
@pytest.mark.first_case
def test_a_script_cannot_tell(source: str, write: Callable[..., Path], run_both: Callable[..., Any]) -> None:
    write("train.py", source)
    both = run_both(["train.py"], stdin="one\ntwo\nthree\n")
    both.assert_equal()
    assert "flatout" not in both.watched.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["train.py", "two words", "--help", "--", "-x", "", "--plan"],
        ["./train.py"],
        ["a folder/train.py", "--quiet"],
        ["a folder/../train.py"],
        ["link.py"],
        ["-m", "package", "--help"],
        ["-m", "package.inner.module", "-m", "x y"],
        ["-m", "single"],
    ],
)
@pytest.mark.first_case
def test_names_and_places(
    command: list[str], write: Callable[..., Path], run_both: Callable[..., Any], tmp_path: Path
) -> None:
    for name in ("train.py", "a folder/train.py", "elsewhere/real.py", "single.py", "package/__main__.py"):
        write(name, SURROUNDINGS)
    (tmp_path / "link.py").symlink_to("elsewhere/real.py")
    write("package/__init__.py", "")
    write("package/inner/__init__.py", "print('inner, with argv', __import__('sys').argv[1:])")
    relative = "from . import sibling\nfrom ..inner.sibling import VALUE\nprint(VALUE)\n"
    write("package/inner/module.py", relative + textwrap.dedent(SURROUNDINGS))
    write("package/inner/sibling.py", "VALUE = 1")
    both = run_both(command)
    both.assert_equal()
    assert both.watched.returncode == 0


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("package/module.py", "def f():\n    raise ValueError(1)\nf()"),
        ("package/module.py", "import nowhere_to_be_found"),
        ("package/__init__.py", "import nowhere_to_be_found"),
        ("package/__init__.py", "print('once')\nx = ("),
        ("package/module.py", "import sys\nsys.exit('text')"),
    ],
)
def test_what_a_module_raises(name: str, source: str, write: Callable[..., Path], run_both: Callable[..., Any]) -> None:
    write("package/__init__.py", "")
    write("package/module.py", "")
    write(name, source)
    both = run_both(["-m", "package.module"])
    both.assert_equal()
    assert both.watched.returncode == 1


def test_without_a_place_of_its_own_the_script_gets_none(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_both: Callable[..., Any]
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    write("train.py", "import sys; print(sys.path[0])")
    run_both(["train.py"]).assert_equal()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["missing.py"], "error: no such script: missing.py; looked in "),
        (["folder"], "error: folder is a folder; a script is a file; run a package with -m\n"),
        ([""], "error: the script is ''; a script is a file; name it, or a module with -m\n"),
        (["-m", "missing"], "error: No module named missing; looked along sys.path from "),
        (["-m", "package.missing"], "error: No module named package.missing; looked along"),
        (["-m", "package"], "error: No module named package.__main__; 'package' is a package and cannot"),
        (["-m"], "error: -m needs the name of a module"),
        ([], "error: no script was given"),
    ],
)
def test_what_is_not_there(
    command: list[str], message: str, write: Callable[..., Path], run_both: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    write("package/__init__.py", "")
    watched = run_both(command).watched
    assert watched.returncode == 2
    assert watched.stderr.startswith(message)
    assert "Traceback" not in watched.stderr
    assert not (tmp_path / "flatout-run.json").exists()


@pytest.mark.parametrize("when", ["now", "with threads and handlers"])
def test_an_interrupted_script_dies_of_the_signal(
    when: str, write: Callable[..., Path], run_both: Callable[..., Any], tmp_path: Path
) -> None:
    ending = """
        import atexit, threading
        atexit.register(print, 'handler')
        def work():
            threading.main_thread().join()
            print('thread')
        threading.Thread(target=work).start()
    """
    interrupt = """
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print('begins')
        signal.raise_signal(signal.SIGINT)
    """
    write("train.py", textwrap.dedent(ending if when != "now" else "") + textwrap.dedent(interrupt))
    both = run_both(["train.py"])
    both.assert_equal()
    assert both.watched.returncode == -signal.SIGINT
    assert json.loads((tmp_path / "flatout-run.json").read_text())["script"]["status"] == 130


def test_a_script_without_torch_gets_none(write: Callable[..., Path], tmp_path: Path) -> None:
    write("train.py", "print('no torch here')")
    command = [sys.executable, "-X", "importtime", "-m", "flatout", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.stdout == "no torch here\n"
    assert "flatout.report.run_text" in imported  # it lists what was imported as the script ended, too
    assert not imported & {"torch", "numpy", "typer", "rich"}


def test_check_says_where_a_script_is_wrong(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("x = 1\ny = (\n")
    with pytest.raises(ScriptError, match=rf"{wrong}, line 2: SyntaxError"):
        Target(path=str(wrong)).check()
    wrong.write_bytes(b"x = 1\x00")
    with pytest.raises(ScriptError, match=rf"{wrong}: \w+: .*null bytes"):  # the line is not known
        Target(path=str(wrong)).check()
    with pytest.raises(UsageError, match="no such script"):
        Target(path=str(tmp_path / "none.py")).check()
    Target(module="any.module").check()


def test_what_python_runs_although_it_is_no_source_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text("print('never')\n")
    application, compiled = tmp_path / "train.pyz", tmp_path / "train.pyc"
    with zipfile.ZipFile(application, "w") as packed:
        packed.write(source, "__main__.py")
    py_compile.compile(str(source), str(compiled), doraise=True)
    notebook = tmp_path / "train.ipynb"
    notebook.write_text('{"cells": []}')  # an expression of Python's
    for path, kind in ((application, "zip application"), (compiled, "compiled file"), (notebook, "notebook")):
        with pytest.raises(UsageError, match=rf"{path.name} is a {kind}; a script is Python source"):
            Target(path=str(path)).check_exists()


def test_a_script_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('never')\n")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    for check in (Target.check_exists, Target.check):
        with pytest.raises(UsageError, match=r"cannot read .*train.py: Permission denied; name a script"):
            check(Target(path=str(script)))


def test_a_script_in_a_pipe_is_not_read_before_it_runs(tmp_path: Path) -> None:
    pipe = tmp_path / "train.py"
    os.mkfifo(pipe)
    Target(path=str(pipe)).check_exists()  # reading would wait for a writer


def test_a_target_names_itself() -> None:
    assert Target.from_command(["-m", "a.b", "x"]).command == ["-m", "a.b", "x"]
    assert Target.from_command(["-m", "a.b", "x"]).name == "-m a.b"
    assert Target.from_command(["t.py", "-m"]).arguments == ("-m",)
    assert os.sep not in Target.from_command(["t.py"]).name


@pytest.mark.parametrize(("how", "known"), [("", "KeyError: 'a'"), (" from None", "")])
def test_an_exit_in_a_handler_has_its_cause_unless_it_is_suppressed(how: str, known: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("try:\n    {}['a']\nexcept KeyError:\n    raise SystemExit(2)" + how)
    program = textwrap.dedent("""
        import sys
        from flatout.script.entry import Target, execute
        seen = []
        assert execute(Target(path=sys.argv[1]), lambda error: seen.append(f"{type(error).__name__}: {error}")) == 2
        sys.__stdout__.write("".join(seen))
    """)
    done = subprocess.run([sys.executable, "-c", program, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == known


def test_the_folder_of_a_script_stays_when_it_changes_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text("import os\nos.chdir('/')\n")
    program = textwrap.dedent("""
        from flatout.script.entry import Target, execute
        target = Target(path="sub/train.py")
        execute(target)
        print(target.folder)
    """)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str((tmp_path / "sub").resolve())
