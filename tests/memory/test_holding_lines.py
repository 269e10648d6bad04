"""From a name to the lines that make it grow or shrink."""

from __future__ import annotations

import pytest

from flatout.memory.holding_lines import Scope, hook_lines, lines_of, refers_to_itself


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("history.append(out)", "history"),
        ("self.history.append(out)", "history"),
        ("log['loss'].append(out)", "log"),
        ("queue.appendleft((step, out))", "queue"),
        ("cache[step] = out", "cache"),
        ("self.cache[step] = out", "cache"),
        ("cache.setdefault(step, out)", "cache"),
        ("total += loss", "total"),
        ("total = total + loss", "total"),
        ("self.bank = torch.cat([self.bank, out])", "bank"),
        ("total.add_(loss)", "total"),
        ("optimizer.add_param_group({'params': [new]})", "optimizer"),
        ("heapq.heappush(heap, (1, out))", "heap"),
        ("setattr(store, f'x{step}', out)", "store"),
        ("seen, kept = out, kept + [out]", "kept"),
    ],
)
def test_the_line_that_grows_is_found(line: str, name: str) -> None:
    source = f"{name} = None\nfor step in steps:\n    other.append(1)\n    {line}\n"
    assert lines_of(source, name).grows == (4,)


@pytest.mark.parametrize(
    "line",
    ["queue.pop(0)", "queue.popleft()", "del queue[0]", "queue = queue[-10:]", "heapq.heappop(queue)"],
)
def test_a_line_that_shrinks_is_found(line: str) -> None:
    found = lines_of(f"queue.append(1)\n{line}\n", "queue")
    assert (found.grows, found.shrinks) == ((1,), (2,))


def test_emptying_counts_where_a_condition_does_it() -> None:
    assert lines_of("if len(queue) > 9:\n    queue.clear()\n", "queue").shrinks == (2,)
    assert lines_of("def reset():\n    queue.clear()\n", "queue").shrinks == ()


@pytest.mark.parametrize(
    ("source", "renews"),
    [
        ("for e in epochs:\n    kept, other = [], []\n    for x in data:\n        kept.append(x)\n", (2,)),
        ("for e in epochs:\n    for x in data:\n        kept.append(x)\n    kept.clear()\n", (4,)),
        ("kept = []\nfor e in epochs:\n    for x in data:\n        kept.append(x)\n", ()),
        ("def main():\n    kept = []\n    for x in data:\n        kept.append(x)\nmain()\n", ()),
        ("for x in data:\n    kept = f(x)\n", ()),
    ],
    ids=["each epoch", "emptied", "once", "main", "no growth"],
)
def test_what_is_made_anew_in_each_epoch(source: str, renews: tuple[int, ...]) -> None:
    assert lines_of(source, "kept").renews == renews


def test_a_variable_of_a_function_that_a_loop_calls_is_made_anew() -> None:
    source = "def train():\n    kept = []\n    for x in data:\n        kept.append(x)\nfor e in epochs:\n    train()\n"
    assert lines_of(source, "kept", Scope(first_line=1)).renews == (2,)
    assert lines_of(source, "kept").renews == ()  # it is another one than the module's


def test_what_a_method_that_a_loop_calls_makes_anew() -> None:
    methods = ("__init__(s):\n        s.v = []", "reset(s):\n        s.v = []", "add(s, x):\n        s.v.append(x)")
    body = "".join(f"    def {one}\n" for one in methods).lstrip()
    used = "for e in epochs:\n    meter.reset()\n    for x in data:\n        meter.add(x)\n"
    assert lines_of(f"class Meter:\n    {body}{used}", "v").renews == (5,)
    assert lines_of(f"class Meter:\n    {body}", "v").renews == ()


def test_a_local_is_looked_for_in_its_own_function() -> None:
    source = "def a():\n    kept.append(1)\n\ndef b():\n    kept.append(2)\n"
    assert lines_of(source, "kept").grows == (2, 5)
    assert lines_of(source, "kept", Scope(first_line=4)).grows == (5,)


def test_a_plain_assignment_is_the_last_resort() -> None:
    assert lines_of("last = Node(x)\n", "last").grows == (1,)
    assert lines_of("kept = []\nkept.append(x)\n", "kept").grows == (2,)
    assert lines_of("x = 1\n", "kept").grows == ()


def test_what_is_made_from_itself() -> None:
    source = "bank = torch.cat([bank, x])\nout = model(x)\n"
    assert refers_to_itself(source, 1, "bank")
    assert not refers_to_itself(source, 2, "out")


def test_hooks_are_found_where_they_are_registered() -> None:
    assert hook_lines("x = 1\nmodel.register_forward_hook(f)\n").grows == (2,)
