"""What reductions and products hold on CUDA, against what torch 2.15's own allocator handed out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatout import TrainStep, forecast, supervised
from flatout.memory import cuda_workspaces
from flatout.memory.cuda_reductions import reduction_buffer_bytes, threads_of_a_multiprocessor

LOSS = supervised(nn.CrossEntropyLoss())
COUNTERS = 512
"""The block in which thread blocks count down; it is in the measured bytes too."""
ADA, TURING = (128, (8, 9)), (40, (7, 5))

MEASURED = [
    (ADA, (65536, 512), (512, 1), {0}, 100663808),
    (ADA, (8192, 1024), (1024, 1), {0}, 67109376),
    (ADA, (100000, 1), (1, 1), {0}, 0),
    (ADA, (4194304,), (1,), {0}, 2048),
    (ADA, (4096, 144), (144, 1), {0}, 4719104),
    (ADA, (64, 100), (100, 1), {0}, 0),
    (ADA, (65536, 3), (3, 1), {0}, 1024),
    (ADA, (32, 64, 56, 56), (200704, 3136, 56, 1), {0, 2, 3}, 0),
    (ADA, (8, 128, 1000), (128000, 1000, 1), {0, 1}, 8192512),
    (ADA, (1000, 100000), (100000, 1), {1}, 0),
    (ADA, (65536, 512), (1, 65536), {0}, 0),
    (TURING, (65536, 512), (512, 1), {0}, 20972032),
    (TURING, (8192, 1024), (1024, 1), {0}, 20972032),
    (TURING, (4194304,), (1,), {0}, 1024),
    (TURING, (4096, 144), (144, 1), {0}, 4719104),
]


@pytest.mark.parametrize(("gpu", "shape", "strides", "summed", "measured"), MEASURED)
def test_buffers_are_those_of_torch(gpu: Any, shape: Any, strides: Any, summed: set[int], measured: int) -> None:
    multiprocessors, capability = gpu
    found = reduction_buffer_bytes(
        shape,
        strides,
        summed,
        element_bytes=4,
        multiprocessors=multiprocessors,
        threads_each=threads_of_a_multiprocessor(capability),
    )
    blocks = -(-found // 512) * 512
    assert blocks + (COUNTERS if found else 0) == measured


def test_an_empty_tensor_needs_none() -> None:
    assert reduction_buffer_bytes((0, 4), (4, 1), {0}, element_bytes=4, multiprocessors=8, threads_each=2048) == 0


def _peaks(device: str) -> Any:
    model = nn.Linear(16, 1024)
    batch = torch.randn(4, 16), torch.randint(1024, (4,))
    return forecast(
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS), batch, device=device, batch_size=8192
    )


@pytest.mark.skipif(not cuda_workspaces.keeps_blas_workspace(), reason="torch gives them back")
def test_forward_and_backward_passes_keep_a_workspace_each() -> None:
    """On an H100 with torch 2.11, 80 cases of the benchmark held these 65 MiB."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = torch.randn(4, 16), torch.randint(4, (4,))
    found = forecast(TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS), batch, device="h100")
    assert found.categories["workspaces"] == (32 + 32 + 1) * 2**20
    convolution = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images = torch.randn(4, 1, 8, 8), torch.randint(4, (4,))
    without = forecast(
        TrainStep(convolution, torch.optim.SGD(convolution.parameters(), 0.1), LOSS), images, device="h100"
    )
    assert without.categories["workspaces"] == 0


def test_a_forecast_counts_the_sums_of_bias_gradients() -> None:
    """64 MiB on 128 multiprocessors, 20 on 40: twice what the gradient takes from which the bias's is summed."""
    large, small = _peaks("rtx-4090"), _peaks("t4")
    assert large.operation.startswith("sum")
    assert large.categories["temporaries"] >= 67109376
    assert small.tensor_bytes < large.tensor_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="'cuda' is the GPU that is here")
def test_an_unknown_gpu_is_said_to_be_one() -> None:
    known, unknown = _peaks("rtx-4090"), _peaks("cuda")
    assert unknown.uncertainty > known.uncertainty + 0.3
    assert any("column sums" in one for one in unknown.not_covered)
    assert not any("column sums" in one for one in known.not_covered)


@pytest.mark.parametrize(
    ("config", "capability", "size_bytes"),
    [
        ("", (8, 9), 8519680),
        ("", (9, 0), 33554432),
        ("", (12, 0), 8519680),
        ("", None, 8519680),
        (":4096:8", (8, 9), 33554432),
        (":16:8", (8, 9), 131072),
        ("nonsense", (8, 9), 8519680),
    ],
)
def test_cublas_gets_what_torch_gives(
    config: str, capability: Any, size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert cuda_workspaces.blas_workspace_bytes(capability) == size_bytes


def test_since_torch_2_15_a_product_takes_its_workspace_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu132")
    assert not cuda_workspaces.keeps_blas_workspace()
    of = cuda_workspaces.cuda_workspaces(128, (8, 9))
    x, bias = torch.zeros(8, 8), torch.zeros(8)
    plain = of(torch.ops.aten.mm.default, (x, x), {}, x)
    assert plain is not None
    assert plain.inside_bytes == 8519680
    with_bias = of(torch.ops.aten.addmm.default, (bias, x, x), {}, x)
    assert with_bias is not None
    assert with_bias.inside_bytes == 1048576
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert cuda_workspaces.keeps_blas_workspace()
    of = cuda_workspaces.cuda_workspaces(128, (9, 0))
    plain = of(torch.ops.aten.mm.default, (x, x), {}, x)
    assert plain is not None
    assert (plain.inside_bytes, plain.kept_bytes) == (0, {"cuBLAS": 2**25})
    with_bias = of(torch.ops.aten.addmm.default, (bias, x, x), {}, x)
    assert with_bias is not None
    assert with_bias.kept_bytes == {"cuBLAS": 2**25, "cuBLASLt": 2**20}
