"""Samples of a stack, by the script's lines."""

from __future__ import annotations

import dis
import sys
import threading
import time
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from flatout.script.line_sampler import LineSampler, lowest_share
from flatout.script.places import Places


def inside(*files: str) -> FrameType:
    """The innermost frame of a stack with code of these files, from the outermost in."""
    kept: list[FrameType] = []

    def build(rest: tuple[str, ...]) -> None:
        source = "\nbuild(rest)" if len(rest) > 1 else "\nkept.append(sys._getframe())"
        exec(compile(source, rest[0], "exec"), {"build": build, "rest": rest[1:], "kept": kept, "sys": sys})

    build(files)
    return kept[0]


def places() -> Places:
    """To which this file is no file of the script."""
    made = Places("/s")
    made._users[__file__] = False
    return made


LIBRARY = "/x/site-packages"


@pytest.mark.parametrize(
    ("stack", "activity", "file"),
    [
        (["/s/train.py"], "script", "train.py"),
        (["/s/train.py", f"{LIBRARY}/matplotlib/figure.py", f"{LIBRARY}/numpy/a.py"], "plotting", "train.py"),
        (["/s/train.py", f"{LIBRARY}/torch/utils/tensorboard/writer.py"], "logging", "train.py"),
        (["/s/train.py", f"{LIBRARY}/tqdm/std.py", f"{LIBRARY}/torch/utils/data/dataloader.py"], "loader", "train.py"),
        (["/s/train.py", f"{LIBRARY}/torch/utils/data/dataloader.py", "/s/sets.py"], "transform", "sets.py"),
        (["/s/train.py", f"{LIBRARY}/torch/nn/modules/module.py", "/s/net.py"], "model", "net.py"),
        (["/s/train.py", f"{LIBRARY}/torch/autograd/__init__.py"], "backward", "train.py"),
        (["/s/train.py", f"{LIBRARY}/torch/autograd/__init__.py", "/s/round.py"], "backward", "round.py"),
        (["/s/train.py", f"{LIBRARY}/torch/optim/adam.py"], "optimizer", "train.py"),
        (["/s/train.py", f"{LIBRARY}/torch/serialization.py"], "disk", "train.py"),
        (["/s/train.py", f"{LIBRARY}/numpy/lib/_npyio_impl.py"], "disk", "train.py"),
        (["/s/train.py", f"{LIBRARY}/numpy/lib/_function_base_impl.py"], "script", "train.py"),  # np.percentile
    ],
)
def test_what_a_stack_is_doing(stack: list[str], activity: str, file: str) -> None:
    sampler = LineSampler(places(), threading.get_ident())
    sampler.add(inside(*stack), 0.5)
    (found,) = sampler.times(steps=1)
    assert (found.activity, found.line[0], found.line[1], found.seconds) == (activity, file, 2, 0.5)


def test_the_library_that_a_line_calls() -> None:
    sampler = LineSampler(places(), threading.get_ident())
    for _ in range(2):
        sampler.add(inside("/s/train.py", f"{LIBRARY}/gym/env.py", f"{LIBRARY}/numpy/core.py"), 0.5)
    (found,) = sampler.times(steps=1)
    assert (found.activity, found.library) == ("script", "gym")
    for _ in range(2):
        sampler.add(inside("/s/train.py"), 0.5)
    (found,) = sampler.times(steps=1)
    assert found.library == ""


def test_a_jump_back_without_a_line_is_in_the_loop_that_it_repeats() -> None:
    loops = "for i in range(9):\n    for j in range(9):\n        if i > j:\n            x = i\n    y = i\n"
    code = compile(loops, "/s/train.py", "exec")
    jump = next(one.offset for one in dis.get_instructions(code) if one.opname.startswith("JUMP_BACKWARD"))
    frame: Any = SimpleNamespace(f_code=code, f_lineno=None, f_lasti=jump, f_back=None)
    sampler = LineSampler(places(), threading.get_ident())
    sampler.add(frame, 0.5)
    (found,) = sampler.times(steps=1)
    assert found.line[0] == "train.py"
    assert found.line[1] in (3, 4)


@pytest.mark.parametrize(
    ("stack", "activity"),
    [
        (["/s/train.py"], "torch"),
        (["/s/train.py", f"{LIBRARY}/loguru/_logger.py"], "torch"),
        (["/s/train.py", f"{LIBRARY}/torch/optim/adam.py"], "optimizer"),
    ],
)
def test_a_wait_for_the_gpu_is_not_the_time_of_the_line_that_waits(stack: list[str], activity: str) -> None:
    sampler = LineSampler(places(), threading.get_ident())
    sampler.waits = lambda: True
    sampler.add(inside(*stack), 0.5)
    assert [one.activity for one in sampler.times(steps=1)] == [activity]


@pytest.mark.parametrize(
    ("stack", "activity"),
    [(["/s/train.py"], "model"), (["/s/train.py", f"{LIBRARY}/torch/serialization.py"], "disk")],
)
def test_lines_of_an_evaluation_are_no_python_of_the_scripts(stack: list[str], activity: str) -> None:
    sampler = LineSampler(places(), threading.get_ident())
    sampler.evaluates = lambda: True
    sampler.add(inside(*stack), 0.5)
    assert sampler.times(steps=1)[0].activity == activity


def test_a_thread_samples_the_main_one() -> None:
    switch = sys.getswitchinterval()
    sampler = LineSampler(Places("/"), threading.get_ident())
    sampler.start()
    for _ in range(500):
        time.sleep(0.01)
        if sum(one.samples for one in sampler.times(1)) >= 3:
            break
    sampler.stop()
    assert sys.getswitchinterval() == switch
    assert sampler.times(1)[0].line[2].startswith(("time.sleep", "if sum"))


def test_an_interval_of_a_share() -> None:
    assert lowest_share(0, 0) == 0.0
    assert lowest_share(0, 100) == 0.0
    assert 0.38 < lowest_share(50, 100) < 0.42
    assert lowest_share(5, 10) < lowest_share(500, 1000) < 0.5


def test_what_comes_after_the_last_step_is_no_part_of_any() -> None:
    sampler = LineSampler(places(), threading.get_ident())
    optimizing = "/s/train.py", f"{LIBRARY}/torch/optim/adam.py"
    sampler.add(inside(*optimizing), 0.5)
    sampler.step_ended()
    sampler.add(inside(*optimizing), 0.25)
    sampler.add(inside("/s/train.py", f"{LIBRARY}/matplotlib/figure.py"), 2.0)
    assert [one.activity for one in sampler.times(1)] == ["plotting", "optimizer"]
    sampler.drop_since_step()
    (found,) = sampler.times(1)
    assert (found.activity, found.seconds, found.samples) == ("optimizer", 0.5, 1)
