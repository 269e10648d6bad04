"""What holds for every model: shapes, gradients, blocks that can be found, sizes that are known."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import flatout.models
from flatout.levers.compile import repeated_blocks
from flatout.models import GPT2, Bert, BertConfig, GPT2Config, ResNet, ResNetConfig
from tests.models.small import SMALL, main_output, resnet

every_model = pytest.mark.parametrize("name", SMALL)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@every_model
@pytest.mark.parametrize(("batch", "length"), [(3, 7), (1, 1), (2, 14)])
def test_shapes(name: str, batch: int, length: int) -> None:
    small = SMALL[name]
    output = main_output(small.make().eval()(*small.inputs(batch, length)))
    assert output.shape == small.output(batch, length)
    assert output.dtype is torch.float32
    assert output.isfinite().all()


@every_model
def test_gradients_reach_every_parameter(name: str) -> None:
    small = SMALL[name]
    model = small.make()
    output = model(*small.inputs(4, 14))
    loss = main_output(output).square().sum()
    if name == "bert":
        loss = loss + output.pooled.sum()
    loss.backward()
    assert [path for path, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@every_model
def test_state_dict_round_trip(name: str) -> None:
    small = SMALL[name]
    first, second, inputs = small.make().eval(), small.make().eval(), small.inputs(2, 5)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(main_output(second(*inputs)), main_output(first(*inputs)), rtol=0, atol=0)


@every_model
def test_bf16_weights_give_bf16(name: str) -> None:
    small = SMALL[name]
    inputs = [x.bfloat16() if x.is_floating_point() else x for x in small.inputs(2, 5)]
    assert main_output(small.make().eval().bfloat16()(*inputs)).dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["transformer", "bert_masked_lm", "gpt2", "seq2seq", "resnet"])
def test_blocks_are_found_for_regional_compile(name: str) -> None:
    model = SMALL[name].make()
    lists = [child for child in model.modules() if isinstance(child, nn.ModuleList)]
    assert repeated_blocks(model) == [*lists[0]]


@pytest.mark.parametrize(
    "name",
    [
        *("mlp", "convnet", "transformer", "bert_masked_lm", "gpt2"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet", "seq2seq")),
    ],
)
@pytest.mark.first_case
def test_no_graph_breaks(name: str) -> None:
    """Traced whole, forward and backward, without code generation, which is not the model's business."""
    small = SMALL[name]
    model, inputs = small.make(), small.inputs(3, 7)
    traced = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for forward in (traced, model):
        model.zero_grad()
        output = forward(*inputs)
        output.square().sum().backward()
        gradients.append([output.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


@every_model
def test_runs_on_fake_tensors(name: str) -> None:
    """Nothing in making or running a model looks at values: its memory can be forecast, no device is waited for."""
    small = SMALL[name]
    with FakeTensorMode():
        main_output(small.make()(*small.inputs(3, 7))).sum().backward()


def test_no_graph_breaks_with_a_mask() -> None:
    model, (tokens,) = SMALL["bert_masked_lm"].make().eval(), SMALL["bert_masked_lm"].inputs(3, 7)
    lengths = torch.tensor([7, 2, 0])
    traced = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(traced(tokens, valid=lengths), model(tokens, valid=lengths))
    mask = torch.arange(7) < lengths[:, None]
    torch.testing.assert_close(traced(tokens, valid=mask), model(tokens, valid=mask))


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (lambda: GPT2(GPT2Config(vocab_multiple=1)), 124_439_808),
        (lambda: GPT2(GPT2Config.of_size("355M", vocab_multiple=1)), 354_823_168),
        (lambda: GPT2(GPT2Config.of_size("774M", vocab_multiple=1)), 774_030_080),
        (lambda: GPT2(GPT2Config.of_size("1.5B", vocab_multiple=1)), 1_557_611_200),
        (lambda: GPT2(GPT2Config()), 124_439_808 + (50304 - 50257) * 768),
        (lambda: Bert(BertConfig.base(vocab_multiple=1)), 109_482_240),
        (lambda: Bert(BertConfig.large(vocab_multiple=1)), 335_141_888),
        (lambda: ResNet(), 25_557_032),
        (lambda: ResNet(ResNetConfig(stages=(3, 4, 23, 3))), 44_549_160),
        (lambda: ResNet(ResNetConfig(stages=(3, 8, 36, 3))), 60_192_808),
    ],
)
def test_parameter_counts_are_the_published_ones(make: Any, parameters: int) -> None:
    with torch.device("meta"):
        model = make()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_resnet_blocks_start_as_the_identity() -> None:
    model = ResNet(ResNetConfig(classes=5, stages=(2,), width=4)).eval()
    x = torch.rand(2, 16, 5, 5)
    torch.testing.assert_close(model.blocks[1](x), x)
    assert resnet().blocks[1].norm3.weight.all()


def test_resnet_takes_channels_last() -> None:
    model, images = resnet().eval(), torch.randn(2, 3, 32, 32)
    expected = model(images)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(images.to(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-5)


def test_gpt2_adds_less_the_more_layers_it_has() -> None:
    model = GPT2(GPT2Config(vocab_size=65, max_tokens=8, width=256, heads=4, layers=8))
    block = model.blocks[3]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for part in (block.attention.out, block.feed_forward.down):
        assert part.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
        assert not part.bias.any()


def test_names_are_explained() -> None:
    assert len(flatout.models.__all__) == len(set(flatout.models.__all__))
    for name in flatout.models.__all__:
        doc = getattr(flatout.models, name).__doc__ or ""
        assert doc, name
        assert not doc.startswith(f"{name}("), f"{name}: a docstring that dataclass made, not a person"


def test_importing_the_models_changes_nothing() -> None:
    code = (
        "import torch; before = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()\n"
        "import flatout.models\n"
        "assert torch.equal(before[0], torch.get_rng_state())\n"
        "assert before[1:] == (torch.get_default_dtype(), torch.get_num_threads())\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
