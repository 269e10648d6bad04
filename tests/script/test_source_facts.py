"""What a script's source says."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from flatout.script.source_facts import SourceFacts, read_source
from flatout.tracebacks import within

LOOP = """
import torch
losses = []
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad(set_to_none=False)
        loss = criterion(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(loss)
        if step % 50 == 0:
            print(loss.item())
        {line}
    evaluate()

def report(loss):
    writer.add_scalar("loss", loss)

def evaluate():
    model(x)
"""


def of(line: str = "pass") -> SourceFacts:
    return SourceFacts.of({"train.py": LOOP.replace("{line}", line)})


def test_calls_have_their_lines_and_options() -> None:
    found = of()
    assert found.lines_calling("clip_grad_norm_") == (
        ("train.py", 9, "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
    )
    (zero,) = found.with_option("set_to_none", False)
    assert (zero.name, zero.line[1], zero.in_training_loop) == ("optimizer.zero_grad", 6, True)
    (printed,) = found.calling("print")
    assert printed.guarded
    assert not found.calling("model.parameters")[0].guarded


@pytest.mark.parametrize(
    ("loop", "repeats"),
    [
        ("for _ in range(8):\n    loss.backward()", True),
        ("for step in range(8):\n    f(step); loss.backward()", False),
        ("for x in loader:\n    loss.backward()", False),
        ("for _ in range(8):\n    def closure():\n        loss.backward()\n    opt.step(closure)", False),
        ("while True:\n    loss.backward()", False),
        ("for _ in range(8):\n    loss.backward(); optimizer.step()", False),
        ("for _ in range(8):\n    loss.backward(); scheduler.step()", True),
    ],
)
def test_loops_that_do_the_same_again(loop: str, repeats: bool) -> None:
    (call,) = SourceFacts.of({"train.py": loop}).calling("backward")
    assert call.repeats is repeats


def test_functions_that_the_training_loop_calls_are_in_it() -> None:
    found = of()
    assert found.calling("add_scalar")[0].in_training_loop
    assert found.lines_calling("model", in_training_loop=True) == (("train.py", 7, "loss = criterion(model(x), y)"),)


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("losses.append(loss)", ["losses"]),
        ("losses.append(loss.item())", []),
        ("losses.append(loss.detach())", []),
        ("losses.append(float(loss))", []),
        ("losses.append((epoch, loss.item()))", []),
        ("losses.append((epoch, loss))", ["losses"]),
        ("total += loss", ["total"]),
        ("total = total + loss", ["total"]),
        ("total += loss.item()", []),
        ("total += loss.item() * len(x)", []),
        ("names.append('a')", []),
        ("records.append({'loss': loss.item()})", []),
        ("records.append({'out': out})", ["records"]),
    ],
)
def test_what_is_kept_with_its_graph(line: str, kept: list[str]) -> None:
    assert [one.container for one in of(line).kept if not one.detached] == kept


@pytest.mark.parametrize(
    ("line", "bounded"),
    [
        ("kept.append(out)", False),
        ("kept.append(out); kept = kept[-10:]", True),
        ("kept.append(out); kept.pop(0)", True),
        ("kept.append(out); kept.clear()", True),
    ],
)
def test_containers_that_are_cut(line: str, bounded: bool) -> None:
    assert of(line).kept[0].bounded is bounded


def test_what_a_hook_keeps() -> None:
    text = LOOP.replace("{line}", "pass") + (
        "\nseen = []\ndef remember(module, args, out):\n    seen.append(out)\nmodel.register_forward_hook(remember)\n"
    )
    (kept,) = SourceFacts.of({"train.py": text}).kept
    assert (kept.container, kept.bounded) == ("seen", False)


def test_a_list_of_a_function_that_is_called_for_each_epoch_is_bounded() -> None:
    body = (
        "def train(loader):\n    outs = []\n    for x in loader:\n        loss.backward()\n        outs.append(out)\n"
    )
    once = SourceFacts.of({"train.py": body + "train(loader)\n"}).kept
    often = SourceFacts.of({"train.py": body + "for epoch in range(9):\n    train(loader)\n"}).kept
    assert [one.bounded for one in (*once, *often)] == [False, True]


def test_a_list_that_a_method_makes_anew_is_bounded() -> None:
    text = (
        "class Trainer:\n    def __init__(self):\n        self.outs = []\n"
        "    def reset(self):\n        self.outs = []\n"
        "    def train(self):\n        for x in loader:\n            loss.backward()\n"
        "            self.outs.append(out)\n"
    )
    assert [one.bounded for one in SourceFacts.of({"train.py": text}).kept] == [True]


def test_a_deque_with_a_limit_is_bounded() -> None:
    text = LOOP.replace("losses = []", "losses = deque(maxlen=9)").replace("{line}", "losses.append(loss)")
    assert SourceFacts.of({"train.py": text}).kept[0].bounded


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("scheduler.step()\n    optimizer.step()", True),
        ("optimizer.step()\n    scheduler.step()", False),
        ("scheduler.step()\n    scaler.step(optimizer)", True),
        ("self.lr_scheduler.step()\n    self.optimizer.step()", True),
        ("scheduler.step()", False),
        ("if a:\n        scheduler.step()\n    optimizer.step()", False),
    ],
)
def test_schedulers_before_optimizers(body: str, found: bool) -> None:
    facts = SourceFacts.of({"t.py": f"for x in data:\n    {body}\n"})
    assert bool(facts.scheduler_first) is found


TWO_PAIRS = "sched_a = StepLR(opt_a, 2)\nsched_b = StepLR(optimizer=opt_b, step_size=2)\nfor x in data:\n    {}\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TWO_PAIRS.format("opt_a.step(); sched_a.step(); opt_b.step(); sched_b.step()"), None),
        (TWO_PAIRS.format("train_a(x); sched_a.step(); opt_b.step(); sched_b.step()"), None),
        (TWO_PAIRS.format("sched_b.step(); opt_a.step(); sched_a.step(); opt_b.step()"), "sched_b.step()"),
        (TWO_PAIRS.format("opt_a.step(); sched_a.step(); sched_b.step(); scaler.step(opt_b)"), "sched_b.step()"),
        ("for x in data:\n    train_a(x)\n    lr_a.step()\n    opt_b.step()\n    opt_a.step()\n", None),  # whose is it?
    ],
)
def test_whose_scheduler_it_is(text: str, found: str | None) -> None:
    pairs = SourceFacts.of({"t.py": text.replace("; ", "\n    ")}).scheduler_first
    assert [early[2] for early, _ in pairs] == ([found] if found else [])


@pytest.mark.parametrize(
    ("line", "divided"),
    [("loss = loss / 4", True), ("loss /= 4", True), ("(criterion(a) / 4).backward()", False), ("x = y / 4", False),
     ("p.grad /= 4", True), ("loss.div(4).backward()", True),
     ("l.backward(gradient=torch.tensor(1.0 / accum))", True), ("l.backward(weight)", True),
     ("l.backward()", False), ("l.backward(None)", False), ("l.backward(torch.ones_like(l))", False),
     ("o = SGD(p, 0.1 / n) if i % n else None", True), ("o = SGD(p, lr=0.1 / n * 2) if i % n else None", True),
     ("lr = base / n if i % m else 0", False), ("o = SGD(p, lr=0.1 / n)", False)],
)  # fmt: skip
def test_divisions_of_losses(line: str, divided: bool) -> None:
    assert bool(of(line).loss_divided) is divided


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("print(loss)", "logging"),
        ("writer.add_scalar('a', 1)", "logging"),
        ("plt.savefig('a.png')", "plotting"),
        ("fig.savefig('a.png')", "plotting"),
        ("torch.save(model, 'a')", "disk"),
        ("f.write('a')", "disk"),
        ("json.dump(a, f)", "disk"),
        ("y = [i * i for i in range(9)]", "script"),
        ("model.eval()", "script"),
    ],
)
def test_what_a_line_is_for(line: str, kind: str) -> None:
    found = of(line)
    assert found.kind_of(("train.py", 14, "")) == kind


MODULE = (
    "class Mine(nn.Module):\n    def __init__(self, n):\n        {made}\n    def forward(self, x):\n        {body}\n"
)


@pytest.mark.parametrize(
    ("made", "body", "torchs"),
    [
        ("self.w = nn.Parameter(torch.ones(n))", "return self.w * (x - x.mean(-1)) / x.std(-1)", "LayerNorm"),
        ("self.w = nn.Parameter(torch.ones(n))", "return self.w * x * torch.rsqrt(x.pow(2).mean(-1))", "RMSNorm"),
        ("self.w = nn.Parameter(torch.ones(n))", "return self.w * x / torch.sqrt((x ** 2).mean(dim=-1))", "RMSNorm"),
        ("self.w = nn.Parameter(torch.ones(n))", "return self.w * (x - x.mean((2, 3))) / x.std((2, 3))", ""),
        ("self.w = nn.Parameter(torch.ones(n))", "return self.w * (x - x.mean(1)) / x.std(self.dim)", ""),
        (
            "self.w = nn.Parameter(torch.ones(n))",
            "w = (self.w - self.w.mean(-1)) / self.w.std(-1)\n        return F.conv2d(x, w)",
            "",
        ),
        ("pass", "return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x ** 3)))", "GELU(approximate='tanh')"),
        ("pass", "return x * torch.sigmoid(x)", "SiLU"),
        ("pass", "return x.sigmoid() * x", "SiLU"),
        ("pass", "return x * torch.sigmoid(1.702 * x)", ""),
        ("pass", "return x[0] * torch.sigmoid(x[1])", ""),
        ("pass", "return 0.5 * x * (1 + torch.erf(x / 1.4142))", "GELU"),
        ("pass", "return 0.5 * (1 + torch.erf(x / 1.4142))", ""),
        ("pass", "return x * (torch.rand_like(x) > self.p) if self.training else x", "Dropout"),
        ("pass", "return x * torch.empty(x.shape).bernoulli_(self.p) if self.training else x", "Dropout"),
        ("pass", "return x + torch.rand_like(x) if self.training else x", ""),
        ("pass", "return x * (torch.rand(x.shape[0], 1) > self.p) if self.training else x", ""),
        ("self.a = nn.Linear(n, n)", "return self.a(x) * torch.sigmoid(x)", ""),
        ("pass", "return F.gelu(x)", ""),
        ("self.a = nn.Linear(n, n)", "return F.scaled_dot_product_attention(x, x, x)", ""),
    ],
)
def test_layers_that_torch_has(made: str, body: str, torchs: str) -> None:
    facts = SourceFacts.of({"m.py": MODULE.format(made=made, body=body)})
    assert [one.torchs for one in facts.layers] == ([torchs] if torchs else [])


@pytest.mark.parametrize(
    ("over", "torchs"), [("0", "BatchNorm1d"), ("(0, 2, 3)", "BatchNorm2d"), ("[0, 2, 3, 4]", "BatchNorm3d")]
)
def test_batch_norms_are_named_by_their_dimensions(over: str, torchs: str) -> None:
    body = (
        "if not self.training:\n            return (x - self.mean) * self.w\n"
        f"        return self.w * (x - x.mean({over})) / torch.sqrt(x.var({over}) + 1e-5)"
    )
    facts = SourceFacts.of({"m.py": MODULE.format(made="self.w = nn.Parameter(torch.ones(n))", body=body)})
    assert [one.torchs for one in facts.layers] == [torchs]


def test_files_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("f(1)\n")
    (tmp_path / "b.py").write_text("def (\n")
    found = read_source([str(tmp_path / name) for name in ("a.py", "b.py", "c.py")], str(tmp_path))
    assert found.files == ("a.py", "b.py")
    assert found.calls[0].line == ("a.py", 1, "f(1)")
    assert within("/elsewhere/a.py", str(tmp_path)) == "/elsewhere/a.py"


KEPT_ELSEWHERE = """
class Trainer:
    def fit(self):
        for epoch in range(3):
            for batch in data:
                self.train_batch(batch)
    def train_batch(self, batch):
        out = self.model(batch)
        out.mean().backward()
        self.optimizer.step()
        self.outputs.append(out.detach())

class Features:
    def __init__(self):
        self.cache = {}
    def __call__(self, key, x):
        self.cache[key] = torch.cos(x)
        return self.cache[key]

seen = {"first": []}
recent = {}
def watch(name):
    def hook(module, inputs, output):
        seen[name].append(output.detach())
        recent.clear()
        recent[name] = output
    return hook
model.register_forward_hook(watch("first"))

features = Features()
for epoch in range(3):
    rows[2:4] = torch.zeros(2)
    table["mean"] = model(x)
    loss = model(features(epoch, x))
    loss.backward()
"""


def test_what_is_kept_in_methods_hooks_and_dicts() -> None:
    kept = {one.container: (one.bounded, one.line[2]) for one in SourceFacts.of({"train.py": KEPT_ELSEWHERE}).kept}
    assert kept == {
        "self.outputs": (False, "self.outputs.append(out.detach())"),
        "self.cache": (False, "self.cache[key] = torch.cos(x)"),
        "seen": (False, "seen[name].append(output.detach())"),
        "recent": (True, "recent[name] = output"),
    }


def test_a_loop_trains_where_a_function_does_that_it_calls() -> None:
    facts = SourceFacts.of({"train.py": KEPT_ELSEWHERE})
    assert {one.line[1] for one in facts.calling("self.train_batch", in_training_loop=True)} == {6}
    assert facts.calling("self.optimizer.step", in_training_loop=True)


IN_CLASS = "class Mine{}:\n    def __init__(self):\n        self.s = StepLR(opt, 2)\n"
EPOCHS = "opt = torch.optim.SGD(p, 1)\nsched = StepLR(opt, 2)\n{}for epoch in range(9):\n{}"
BATCHES = "    for x in data:\n        opt.step()\n"


@pytest.mark.parametrize(
    ("before", "body", "found"),
    [
        ("", "    sched.step()\n" + BATCHES, True),
        ("", BATCHES + "    sched.step()\n", False),
        ("", "    sched.step(epoch)\n" + BATCHES, False),  # as schedules are used that take the epoch
        ("", "    if epoch:\n        sched.step()\n" + BATCHES, False),
        ("", "    opt.step()\n    sched.step()\n" + BATCHES, False),
        ("for x in data:\n    opt.step()\n", "    sched.step()\n" + BATCHES, False),
        ("def train():\n    for x in data:\n        opt.step()\n", "    sched.step()\n    train()\n", True),
        ("def train():\n    for x in data:\n        opt.step()\n", "    train()\n    sched.step()\n", False),
    ],
)
def test_schedulers_first_in_an_epoch(before: str, body: str, found: bool) -> None:
    facts = SourceFacts.of({"t.py": EPOCHS.format(before, body)})
    assert bool(facts.scheduler_first_in_epoch) is found


@pytest.mark.parametrize(("stepped", "found"), [("opt", True), ("other_opt", False), ("given_opt", True)])
def test_an_epoch_that_steps_other_optimizers(stepped: str, found: bool) -> None:
    """A name that no optimizer is made under, as that of a function's argument, may be any."""
    body = f"    sched.step()\n    for x in data:\n        {stepped}.step()\n"
    text = EPOCHS.format("other_opt = torch.optim.SGD(q, 1)\n", body)
    assert bool(SourceFacts.of({"t.py": text}).scheduler_first_in_epoch) is found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lr_scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)\nprint(lr_scheduler.get_last_lr())\n", True),
        ("StepLR(opt, 2)\n", True),
        (IN_CLASS.format(""), True),
        (IN_CLASS.format("(nn.Module)"), True),
        ("class Base:\n    pass\n" + IN_CLASS.format("(Base)"), True),
        (IN_CLASS.format("") + "    def end(self):\n        self.s.step()\n", False),
        (IN_CLASS.format("(pl.Trainer)"), False),  # which may step it
        (IN_CLASS.format("(Mine)"), False),
        ("class Base(pl.Trainer):\n    pass\n" + IN_CLASS.format("(Base)"), False),
        ("trainer.s = StepLR(opt, 2)\n", False),
        ("s = StepLR(opt, 2)\nmodel, s = accelerator.prepare(model, s)\n", False),
        ("s = StepLR(opt, 2)\nkept = [s]\n", False),
        ("def configure_optimizers(self):\n    s = StepLR(opt, 2)\n    return s\n", False),
        ("s = StepLR(opt, 2, last_epoch=3)\n", False),
        ("s = StepLR(opt, 2)\nlocals()['s'].step()\n", False),
        ("s = make(opt)\n", False),
    ],
)
def test_schedulers_that_nothing_uses(text: str, found: bool) -> None:
    assert bool(SourceFacts.of({"t.py": text}).unused_schedulers) is found


def test_a_scheduler_that_another_file_steps_is_used() -> None:
    texts = {"make.py": "scheduler = StepLR(opt, 2)\n", "train.py": "make.scheduler.step()\n"}
    assert not SourceFacts.of(texts).unused_schedulers


def test_lines_are_counted_as_python_counts_them(tmp_path: Path) -> None:
    """A form feed ends no line; a byte order mark is no part of the source."""
    (tmp_path / "train.py").write_bytes(b"\xef\xbb\xbfimport torch\r\n\x0c\r\nloss.backward()\r\n")
    found = read_source([str(tmp_path / "train.py")], str(tmp_path))
    assert found.lines_calling("backward") == (("train.py", 3, "loss.backward()"),)


def test_expressions_of_any_depth_are_read(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(1000)  # Python's own, whatever an import has set
    deep = " + ".join(["x"] * 600)
    source = f"for x in loader:\n    print({deep})\n    rate = rate / ({deep})\n    loss.backward()\n"
    found = SourceFacts.of({"train.py": source})
    assert [one.arguments for one in found.calling("print")] == [("...",)]
    assert not found.loss_divided


def test_functions_that_all_call_one_another_are_read() -> None:
    names = [f"f{number}" for number in range(60)]
    calls = "".join(f"    {name}()\n" for name in names)
    text = EPOCHS.format("".join(f"def {name}():\n{calls}" for name in names), f"    sched.step()\n{calls}")
    assert not SourceFacts.of({"t.py": text}).scheduler_first_in_epoch
