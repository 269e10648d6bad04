from flatout.machine.published_peaks import published_peaks


def test_figures_are_dense_and_sourced() -> None:
    found, source = published_peaks("NVIDIA H200")
    assert found is not None
    assert found.flops_per_second["bf16"] == 989.5e12  # the data sheet prints 1,979 with sparsity
    assert found.memory_bytes_per_second == 4.8e12
    assert "dense" in found.convention
    assert source == found.source


def test_an_unknown_gpu_gets_no_other_gpus_figure() -> None:
    found, reason = published_peaks("NVIDIA GeForce RTX 4090 Laptop GPU")
    assert found is None
    assert "RTX 4090 Laptop" in reason


def test_a_missing_dtype_has_no_figure() -> None:
    found, _ = published_peaks("Tesla V100-SXM2-16GB")
    assert found is not None
    assert "bf16" not in found.flops_per_second
