"""Each choice of a plan as it is written into scripts: the lines that are removed and added."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from flatout.plan_choices import declared
from flatout.script.own_files import content_digest
from flatout.source_patch.autocast_form import TO_FP32
from flatout.source_patch.forms import FORMS, WITHOUT_FORM
from tests.source_patch.patching import changed_lines, patch_for

PLAIN = """\
import torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    loss = nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

EPOCHS = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(model, loader, optimizer, criterion):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        output = model(data)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def test(model, loader):
    model.eval()
    for data, target in loader:
        print(model(data).argmax(dim=1).eq(target).sum())


def main():
    inputs, labels = torch.randn(64, 4), torch.randint(2, (64,))
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True)
    # the model
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    criterion = nn.CrossEntropyLoss()

    # the training
    for epoch in range(3):
        train(model, loader, optimizer, criterion)
        test(model, loader)


if __name__ == "__main__":
    main()
"""


def test_every_choice_of_a_script_has_a_form_or_a_reason() -> None:
    choices = {name for name, one in declared().items() if "script" in one.scopes}
    assert {*FORMS, *WITHOUT_FORM} == choices, "flatout/source_patch/forms.py: each is in FORMS or WITHOUT_FORM"
    assert not {*FORMS} & {*WITHOUT_FORM}


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"threads": 1}, "+\n+torch.set_num_threads(1)\n"),
    ({"flush_denormals": True, "threads": 2}, "+\n+torch.set_num_threads(2)\n+torch.set_flush_denormal(True)\n"),
    ({"cudnn_benchmark": True}, "+\n+torch.backends.cudnn.benchmark = True\n"),
    ({"matmul_precision": "high"}, '+\n+torch.set_float32_matmul_precision("high")\n'),
    (
        {"matmul_precision": "medium"},
        '+\n+torch.set_float32_matmul_precision("medium")\n+torch.backends.mkldnn.conv.fp32_precision = "bf16"\n'
        '+torch.backends.mkldnn.rnn.fp32_precision = "bf16"\n',
    ),
]


@pytest.mark.parametrize(("choices", "lines"), SETTINGS)
def test_settings_stand_after_the_imports(tmp_path: Path, choices: dict[str, Any], lines: str) -> None:
    patch = patch_for(tmp_path, PLAIN, **choices)
    assert changed_lines(patch) == lines
    assert patch.files[0].content.decode().startswith("import torch\nfrom torch import nn\n\ntorch.")


@pytest.mark.parametrize(
    ("imports", "lines"),
    [
        ("import torch as th\nimport os\nprint(1)\n", "+\n+th.set_num_threads(1)\n"),
        ("import torch.nn as nn\nprint(1)\n", "+import torch\n+\n+torch.set_num_threads(1)\n"),
        ("import torch.nn\nimport os\nprint(1)\n", "+\n+torch.set_num_threads(1)\n"),
        ("import torch.nn as nn\nprint(0)\nimport torch\nprint(1)\n", "+\n+torch.set_num_threads(1)\n"),
        ("import os\n\ndef f():\n    import torch\n", "+import torch\n+\n+torch.set_num_threads(1)\n"),
        ("import os\n\ndef f():\n    import torch.nn\n", "+import torch\n+\n+torch.set_num_threads(1)\n"),
        (
            "'''doc'''\nfrom __future__ import annotations\nfrom torch import nn\n",
            "+import torch\n+\n+torch.set_num_threads(1)\n",
        ),
    ],
)
def test_torch_under_the_name_that_the_script_gives_it(tmp_path: Path, imports: str, lines: str) -> None:
    assert changed_lines(patch_for(tmp_path, imports, threads=1)) == lines


OPTIMIZERS = [
    (
        "import torch.optim as optim\no = optim.Adam(p, lr=1e-3)\n",
        "fused",
        "-o = optim.Adam(p, lr=1e-3)\n+o = optim.Adam(p, lr=1e-3, fused=True)\n",
    ),
    ("from torch.optim import Adam\no = Adam(p)\n", "fused", "-o = Adam(p)\n+o = Adam(p, fused=True)\n"),
    (
        "from torch.optim import Adam\no = Adam(p for p in ps)\n",
        "fused",
        "-o = Adam(p for p in ps)\n+o = Adam((p for p in ps), fused=True)\n",
    ),
    ("from torch.optim import AdamW as W\no = W(p)\n", "foreach", "-o = W(p)\n+o = W(p, foreach=True)\n"),
    (
        "from torch import optim\no = optim.Adadelta(p)\n",
        "foreach",
        "-o = optim.Adadelta(p)\n+o = optim.Adadelta(p, foreach=True)\n",
    ),
    (
        "import torch\ndef make(net):\n    return torch.optim.SGD(net.parameters(), 0.1)\n",
        "fused",
        "-    return torch.optim.SGD(net.parameters(), 0.1)\n"
        "+    return torch.optim.SGD(net.parameters(), 0.1, fused=True)\n",
    ),
    (
        "import torch\nclass T:\n    def __init__(self):\n        self.o = torch.optim.Adagrad(p)\n",
        "fused",
        "-        self.o = torch.optim.Adagrad(p)\n+        self.o = torch.optim.Adagrad(p, fused=True)\n",
    ),
    (
        "import torch\no = torch.optim.Adam(\n    p,\n    lr=1e-3,  # small\n)\n",
        "fused",
        "+    fused=True,\n",
    ),
    (
        "import torch\no = torch.optim.Adam(\n    p,\n    lr=1e-3  # small\n)\n",
        "fused",
        "-    lr=1e-3  # small\n+    lr=1e-3,  # small\n+    fused=True\n",
    ),
    (
        "import torch\na, b = torch.optim.Adam(p), torch.optim.RMSprop(q)\n",
        "fused",
        "-a, b = torch.optim.Adam(p), torch.optim.RMSprop(q)\n"
        "+a, b = torch.optim.Adam(p, fused=True), torch.optim.RMSprop(q)\n",
    ),
]


@pytest.mark.parametrize(("source", "value", "lines"), OPTIMIZERS)
def test_optimizers(tmp_path: Path, source: str, value: str, lines: str) -> None:
    assert changed_lines(patch_for(tmp_path, source, optimizer=value)) == lines


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import torch\no = getattr(torch.optim, name)(p)\n", "no call of torch.optim's"),
        ("import torch\no = torch.optim.Adam(p, **more)\n", "known only when the script runs"),
        ("import torch\no = torch.optim.Adam(p, capturable=True)\n", "sets capturable itself"),
        ("import torch\no = torch.optim.SGD(p)\np.requires_grad = False\n", "mentions requires_grad"),
        ("def Adam(p): ...\no = Adam(p)\n", "no call of torch.optim's"),
    ],
)
def test_optimizers_that_are_left(tmp_path: Path, source: str, reason: str) -> None:
    patch = patch_for(tmp_path, source, optimizer="fused")
    assert patch.files == ()
    assert reason in patch.left[0].reason


def test_only_optimizers_that_were_seen(tmp_path: Path) -> None:
    source = "import torch\nif x:\n    o = torch.optim.SGD(p)\nelse:\n    o = torch.optim.Adam(p)\n"
    report = {
        "machine": {},
        "plan": {"optimizer": "fused"},
        "observed": {"optimizers": [{"kind": "Adam", "parameters": 2}]},
    }
    patch = patch_for(tmp_path, source, report=report, optimizer="fused")
    assert changed_lines(patch) == "-    o = torch.optim.Adam(p)\n+    o = torch.optim.Adam(p, fused=True)\n"


@pytest.mark.parametrize(
    ("made_at", "lines", "said"),
    [
        (
            "train.py:5",
            "-    p)\n+    p, fused=True)\n",
            "other.py:3 is left",
        ),
        (
            "",
            "p, fused=True)\n-    return torch.optim.Adam(p)\n+    return torch.optim.Adam(p, fused=True)\n",
            "which of train.py:5, other.py:3 the tuned run made",
        ),
        ("train.py:4", "", "made its optimizer at train.py:4, where its class is not called by name"),
    ],
    ids=["noted", "not noted", "made in another way"],
)
def test_only_optimizers_that_the_tuned_run_made(tmp_path: Path, made_at: str, lines: str, said: str) -> None:
    (tmp_path / "other.py").write_text("import torch\ndef never_called(p):\n    return torch.optim.Adam(p)\n")
    source = (
        "import torch\nimport other\nname = 'Adam'\nq = getattr(torch.optim, name)\no = torch.optim.Adam(\n    p)\n"
    )
    (tmp_path / "train.py").write_text(source)
    sources = tuple(f"{content_digest((tmp_path / name).read_bytes())} {name}" for name in ("train.py", "other.py"))
    seen = {"kind": "Adam", "parameters": 2, "made_at": made_at}
    report = {
        "machine": {},
        "plan": {"optimizer": "fused"},
        "observed": {"optimizers": [seen]},
        "sources": list(sources),
    }
    patch = patch_for(tmp_path, source, report=report, optimizer="fused", sources=sources)
    assert lines in changed_lines(patch)
    assert bool(lines) == bool(changed_lines(patch))
    assert any(said in text for text in ([one.reason for one in patch.left] or patch.changes[0].notes))


def test_autocast_around_a_loss_in_one_expression(tmp_path: Path) -> None:
    assert changed_lines(patch_for(tmp_path, PLAIN, precision="bf16")) == (
        "-    loss = nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 2))\n"
        '+    with torch.autocast("cpu", dtype=torch.bfloat16):\n'
        "+        loss = nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 2))\n"
    )


def test_autocast_around_model_and_loss_leaves_evaluation_alone(tmp_path: Path) -> None:
    assert changed_lines(patch_for(tmp_path, EPOCHS, precision="bf16")) == (
        "-        output = model(data)\n-        loss = criterion(output, target)\n"
        '+        with torch.autocast("cpu", dtype=torch.bfloat16):\n'
        "+            output = model(data)\n+            loss = criterion(output, target)\n"
    )


STEP = """\
import torch
import torch.nn.functional as F


{more}class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, y=None):
        {forward}


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    x = torch.randn(8, 4)
    {step}
    loss.backward()
    optimizer.step()
"""
CONTEXT = '    with torch.autocast("cpu", dtype=torch.bfloat16):\n'
AUTOCAST = [
    # a loss of the script's own: the model alone is inside, and what it returns is fp32 again
    (
        "return self.layer(x)",
        "loss = (model(x) ** 2).mean()",
        "-    loss = (model(x) ** 2).mean()\n"
        f"+{CONTEXT}+        model_output = model(x)\n+    loss = (model_output.float() ** 2).mean()\n",
    ),
    (
        "return self.layer(x)",
        "output = model(x)\n    loss = (output - x).abs().mean()",
        f"-    output = model(x)\n+{CONTEXT}+        output = model(x).float()\n",
    ),
    # a loss that the model computes, known to be fp32 under autocast
    (
        "return x, F.cross_entropy(self.layer(x), y)",
        "_, loss = model(x, x)",
        f"-    _, loss = model(x, x)\n+{CONTEXT}+        _, loss = model(x, x)\n",
    ),
    # evaluated the same in bf16: the largest of them
    (
        "return self.layer(x)",
        "output = model(x)\n    loss = F.cross_entropy(output, output.argmax(1))\n    hits = output.argmax(1)",
        "-    output = model(x)\n-    loss = F.cross_entropy(output, output.argmax(1))\n"
        f"+{CONTEXT}+        output = model(x)\n+        loss = F.cross_entropy(output, output.argmax(1))\n",
    ),
    # also used elsewhere: fp32 there
    (
        "return self.layer(x)",
        "output = model(x)\n    loss = F.cross_entropy(output, x)\n    print(output.sum())",
        f"-    output = model(x)\n+{CONTEXT}+        output = model(x).float()\n",
    ),
]


@pytest.mark.parametrize(("forward", "step", "lines"), AUTOCAST)
def test_autocast_of_a_step(tmp_path: Path, forward: str, step: str, lines: str) -> None:
    patch = patch_for(tmp_path, STEP.format(more="", forward=forward, step=step), precision="bf16")
    assert changed_lines(patch) == lines


def test_what_a_model_returns_is_cast_by_a_function_if_the_source_does_not_show_it(tmp_path: Path) -> None:
    source = STEP.format(
        more="", forward="return self.layer(x), (x, x)", step="y, hidden = model(x)\n    loss = own(y, hidden)"
    )
    patch = patch_for(tmp_path, source, precision="bf16")
    lines = changed_lines(patch)
    assert lines.startswith('+def to_fp32(value):\n+    """The bf16 tensors in `value` as fp32."""\n')
    assert lines.endswith(f"-    y, hidden = model(x)\n+{CONTEXT}+        y, hidden = to_fp32(model(x))\n")
    assert (
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n\n\ndef to_fp32"
        not in patch.files[0].content.decode()
    )


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("loss = model(x).mean(); loss.backward()", "in 2 places"),
        ("loss = model(x).mean() if step else 0 * model(x).sum()", "more or less often"),
        ("a = model(x); loss = a.mean()", "shares its line"),
        ("loss = other(x)", "no call of the model"),
    ],
)
def test_autocast_is_left_where_the_step_is_unclear(tmp_path: Path, step: str, reason: str) -> None:
    patch = patch_for(tmp_path, STEP.format(more="", forward="return self.layer(x)", step=step), precision="bf16")
    assert reason in patch.left[0].reason


def test_autocast_needs_a_device_and_bf16(tmp_path: Path) -> None:
    assert "on which device" in patch_for(tmp_path, PLAIN, loop=None, precision="bf16").left[0].reason
    assert "scaled loss" in patch_for(tmp_path, PLAIN, precision="fp16").left[0].reason
    assert (
        "LSTM"
        in patch_for(tmp_path, PLAIN + "\n# LSTM = torch.nn.LSTM\nlayer = torch.nn.LSTM(2, 2)\n", precision="bf16")
        .left[0]
        .reason
    )


def test_a_compiled_model_beside_the_model(tmp_path: Path) -> None:
    """It is passed to the function that trains, and to no other."""
    assert changed_lines(patch_for(tmp_path, EPOCHS, compile="default")) == (
        '+    compiled_model = torch.compile(model, options={"fallback_random": True})\n'
        "-        train(model, loader, optimizer, criterion)\n"
        "+        train(compiled_model, loader, optimizer, criterion)\n"
    )


def test_a_model_that_is_saved_where_it_trains_is_compiled_there(tmp_path: Path) -> None:
    source = EPOCHS.replace("        optimizer.step()\n", "        optimizer.step()\n    torch.save(model, 'm.pt')\n")
    assert changed_lines(patch_for(tmp_path, source, compile="reduce-overhead")) == (
        '+    compiled_model = torch.compile(model, mode="reduce-overhead")\n'
        "-        output = model(data)\n+        output = compiled_model(data)\n"
    )


def test_a_model_that_is_made_in_the_call_is_compiled_where_it_trains(tmp_path: Path) -> None:
    source = (
        "import torch\ndef train(model):\n    for x in data:\n        loss = model(x).sum()\n"
        "        loss.backward()\ntrain(torch.nn.Linear(2, 2))\n"
    )
    assert changed_lines(patch_for(tmp_path, source, compile="default")) == (
        '+    compiled_model = torch.compile(model, options={"fallback_random": True})\n'
        "-        loss = model(x).sum()\n+        loss = compiled_model(x).sum()\n"
    )


def test_a_model_of_the_module_is_compiled_before_the_loop_over_epochs(tmp_path: Path) -> None:
    source = (
        "import torch\nmodel = torch.nn.Linear(2, 2)\ndef train():\n    model.train()\n    for x in data:\n"
        "        loss = model(x).sum()\n        loss.backward()\n"
        "if True:\n    for epoch in range(3):\n        train()\n"
    )
    assert changed_lines(patch_for(tmp_path, source, compile="default")) == (
        "-        loss = model(x).sum()\n+        loss = compiled_model(x).sum()\n"
        '+    compiled_model = torch.compile(model, options={"fallback_random": True})\n'
    )


def test_repeated_blocks_are_compiled_in_place(tmp_path: Path) -> None:
    source = (
        "import torch\nclass Block(torch.nn.Module): ...\nclass Net(torch.nn.Module):\n    def __init__(self):\n"
        "        self.blocks = torch.nn.ModuleList([Block(3) for _ in range(4)])\nmodel = Net()\n"
        "for x in data:\n    loss = model(x).sum()\n    loss.backward()\n"
    )
    seen = {"kind": "Net", "parameters": 4, "repeated_block": "Block", "repeated_blocks": 4}
    report = {"machine": {}, "plan": {"compile": "regional"}, "observed": {"modules": [seen]}}
    patch = patch_for(tmp_path, source, report=report, compile="regional")
    assert changed_lines(patch) == (
        "+for repeated_block in model.modules():\n+    if isinstance(repeated_block, Block):\n"
        '+        repeated_block.compile(options={"fallback_random": True})\n'
    )
    other = source.replace("Block(3) for _", "Block(i) for i")
    assert "compile(dynamic=False, options" in changed_lines(
        patch_for(tmp_path, other, report=report, compile="regional")
    )
    assert "only the report" in patch_for(tmp_path, source, compile="regional").left[0].reason


IN_A_METHOD = """\
class Trainer:
    def __init__(self, model):
        self.model = model

    def step(self, x):
        loss = self.model(x).sum()
        loss.backward()

    def fit(self):
        for x in data:
            self.step(x)


Trainer(Net()).fit()
"""
IN_A_CLOSURE = """\
def main():
    model = Net()
    for x in data:
        def closure():
            loss = model(x).sum()
            loss.backward()
            return loss
        optimizer.step(closure)
"""
MADE_IN_THE_LOOP = """\
for x in data:
    model = Net()
    loss = model(x).sum()
    loss.backward()
"""


@pytest.mark.parametrize("steps", [IN_A_METHOD, IN_A_CLOSURE, MADE_IN_THE_LOOP])
@pytest.mark.parametrize("how", ["default", "regional"])
def test_nothing_is_compiled_in_every_step(tmp_path: Path, steps: str, how: str) -> None:
    blocks = "class Block(torch.nn.Module):\n    pass\n\n\nclass Net(torch.nn.Module):\n    pass\n\n\n"
    seen = {"kind": "Net", "parameters": 4, "repeated_block": "Block", "repeated_blocks": 4}
    report = {"machine": {}, "plan": {"compile": how}, "observed": {"modules": [seen]}}
    patch = patch_for(tmp_path, f"import torch\n\n\n{blocks}{steps}", report=report, compile=how)
    assert patch.files == ()
    assert "no loop is around the step in its function, before which" in patch.left[0].reason


@pytest.mark.parametrize(
    ("made", "lines"),
    [
        (
            "Net().to(device)",
            "-model = Net().to(device)\n+model = Net().to(device, memory_format=torch.channels_last)\n",
        ),
        ("Net()", "-model = Net()\n+model = Net().to(memory_format=torch.channels_last)\n"),
    ],
)
def test_channels_last_where_the_model_is_made(tmp_path: Path, made: str, lines: str) -> None:
    source = STEP.format(more="", forward="return self.layer(x)", step="loss = model(x).sum()")
    assert (
        changed_lines(patch_for(tmp_path, source.replace("= Net()", f"= {made}"), memory_format="channels_last"))
        == lines
    )


def test_whole_batches_of_a_tensor_data_set(tmp_path: Path) -> None:
    assert changed_lines(patch_for(tmp_path, EPOCHS, fetch="batched")) == (
        "-from torch.utils.data import DataLoader, TensorDataset\n"
        "+from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset\n"
        "-    loader = DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True)\n"
        "+    training_data = TensorDataset(inputs, labels)\n"
        "+    loader = DataLoader(training_data, batch_size=None, sampler="
        "BatchSampler(RandomSampler(training_data), 8, "
        "drop_last=False))\n"
    )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "TensorDataset(inputs, labels), batch",
            "Own(inputs), batch",
            "does not show that its data set is a TensorDataset",
        ),
        ("shuffle=True", "shuffle=True, num_workers=2", "worker processes"),
        ("shuffle=True", "shuffle=True, collate_fn=f", "its own collate_fn"),
        ("shuffle=True", "shuffle=True, generator=torch.Generator()", "the generator has no name"),
        ("shuffle=True", "**more", "known only when it runs"),
        ("shuffle=True", "shuffle=args.shuffle", "shuffle is args.shuffle"),
        ("batch_size=8", "batch_size=None", "the loader makes no batches"),
        ("shuffle=True", "sampler=args.sampler", "does not show whether the sampler is None"),
        ("    test(model, loader)\n", "    print(loader.batch_size)\n", "reads loader.batch_size"),
        ("    test(model, loader)\n", "    dl = loader; print(dl.drop_last)\n", "reads dl.drop_last"),
        (
            "for data, target in loader:\n        optimizer",
            "for data, target in other:\n        optimizer",
            "which DataLoader",
        ),
    ],
)
def test_loaders_that_are_left(tmp_path: Path, old: str, new: str, reason: str) -> None:
    assert old in EPOCHS
    assert reason in patch_for(tmp_path, EPOCHS.replace(old, new, 1), fetch="batched").left[0].reason


@pytest.mark.parametrize(
    ("before", "given", "sampler"),
    [
        ("", "shuffle=True, sampler=None", "RandomSampler(training_data)"),
        ("    of_ranks = None\n", "sampler=of_ranks", "SequentialSampler(training_data)"),
        ("    own = RandomSampler(inputs)\n", "sampler=own", "own"),
    ],
)
def test_a_sampler_that_is_none_is_not_kept(tmp_path: Path, before: str, given: str, sampler: str) -> None:
    line = "    loader = DataLoader(TensorDataset(inputs, labels), batch_size=8, "
    assert f"{line}shuffle=True" in EPOCHS
    source = EPOCHS.replace(f"{line}shuffle=True", f"{before}{line}{given}", 1)
    assert f"sampler=BatchSampler({sampler}, 8, drop_last=False)" in changed_lines(
        patch_for(tmp_path, source, fetch="batched")
    )


def test_page_locked_batches_and_their_copies(tmp_path: Path) -> None:
    source = EPOCHS.replace("        optimizer.zero_grad()\n", "        data, target = data.to(d), target.cuda()\n")
    old = "loader = DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True"
    pinned = f"-    {old})\n+    {old}, pin_memory=True)\n"
    assert changed_lines(patch_for(tmp_path, source, pin_memory=True)) == pinned
    assert changed_lines(patch_for(tmp_path, source, non_blocking=True)) == (
        "-        data, target = data.to(d), target.cuda()\n"
        f"+        data, target = data.to(d, non_blocking=True), target.cuda(non_blocking=True)\n{pinned}"
    )


def test_gradients_are_freed(tmp_path: Path) -> None:
    source = PLAIN.replace("zero_grad()", "zero_grad(set_to_none=False)")
    patch = patch_for(tmp_path, source, zero_grad="none")
    assert changed_lines(patch) == (
        "-    optimizer.zero_grad(set_to_none=False)\n+    optimizer.zero_grad(set_to_none=True)\n"
    )
    assert "every parameter gets a gradient" in patch.changes[0].notes[0]
    looked_at = source + "print(model.weight.grad)\n"
    assert "mentions .grad" in patch_for(tmp_path, looked_at, zero_grad="none").left[0].reason


def test_what_has_no_form_names_what_does_the_same(tmp_path: Path) -> None:
    retained, attention = patch_for(tmp_path, PLAIN, allocator="retain", attention="fused").left[::-1]
    assert retained.command == (
        *("MALLOC_MMAP_MAX_=0", "MALLOC_TRIM_THRESHOLD_=2147483647", "MALLOC_TOP_PAD_=67108864"),
        "GLIBC_TUNABLES=glibc.malloc.hugetlb=1",
    )
    assert attention.command == ()
    assert patch_for(tmp_path, PLAIN, device="cpu").left[0].command == ("CUDA_VISIBLE_DEVICES=",)


def test_changes_of_one_place_add_up(tmp_path: Path) -> None:
    patch = patch_for(tmp_path, EPOCHS, precision="bf16", compile="default", optimizer="fused", fetch="batched")
    assert [change.choice for change in patch.changes] == ["fetch", "optimizer", "precision", "compile"]
    assert "train(compiled_model, loader" in changed_lines(patch)
    hoisted = STEP.format(more="", forward="return self.layer(x)", step="loss = (model(x) ** 2).mean()")
    lines = changed_lines(patch_for(tmp_path, hoisted, precision="bf16", compile="default"))
    assert "+        model_output = compiled_model(x)\n" in lines


class Named(NamedTuple):
    scores: Any
    rest: list[Any]


@dataclasses.dataclass(frozen=True)
class Fields:
    scores: Any
    rest: list[Any]


@pytest.mark.parametrize(
    ("made", "parts"),
    [
        (Named, lambda out: (out.scores, out.rest)),
        (Fields, lambda out: (out.scores, out.rest)),
        (lambda scores, rest: OrderedDict(scores=scores, rest=rest), lambda out: (out["scores"], out["rest"])),
        (lambda scores, rest: {"scores": scores, "rest": rest}, lambda out: (out["scores"], out["rest"])),
        (lambda scores, rest: (scores, rest), lambda out: out),
    ],
)
def test_whatever_holds_tensors_is_cast(made: Callable[..., Any], parts: Callable[[Any], Any]) -> None:
    namespace: dict[str, Any] = {"torch": torch}
    exec(TO_FP32.format(name="to_fp32", torch="torch"), namespace)
    given = made(torch.ones(2, dtype=torch.bfloat16), [torch.ones(2, dtype=torch.bfloat16), 3])
    found = namespace["to_fp32"](given)
    assert type(found) is type(given)
    scores, rest = parts(found)
    assert (scores.dtype, rest[0].dtype, rest[1]) == (torch.float32, torch.float32, 3)
    assert parts(given)[0].dtype == torch.bfloat16  # the model may keep what it returned


def test_what_is_off_in_the_plan_changes_nothing(tmp_path: Path) -> None:
    """`flush_denormals = false` turned them on."""
    off: dict[str, Any] = {"flush_denormals": False, "pin_memory": False, "non_blocking": False, "precision": "fp32"}
    patch = patch_for(tmp_path, EPOCHS, **off)
    assert (patch.files, patch.changes, patch.left) == ((), (), ())
    assert "cudnn.benchmark = False" in changed_lines(patch_for(tmp_path, PLAIN, cudnn_benchmark=False))


def test_noise_of_images_is_told_to_be_another(tmp_path: Path) -> None:
    source = STEP.format(more="", forward="return self.layer(x)", step="loss = model(x).sum()")
    (plain,) = patch_for(tmp_path, source, memory_format="channels_last").changes
    (noisy,) = patch_for(tmp_path, source + "# randn_like(x)\n", memory_format="channels_last").changes
    assert len(plain.notes) == 1
    assert "other random numbers" in noisy.notes[1]
