"""The bytes of tensors of every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatout.data.checksums import checksum
from flatout.tensor_bytes import bytes_view


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0),
        torch.arange(6.0)[::3],
        torch.arange(6.0)[::3][:1],
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2),
        torch.arange(4, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.arange(3.0).requires_grad_(),
    ],
    ids=["plain", "strided", "one element with a stride", "scalar", "empty", "transposed", "bf16", "bool", "grad"],
)
def test_bytes_are_those_of_the_values_row_by_row(tensor: Tensor) -> None:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    expected = plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
    assert torch.equal(bytes_view(tensor), expected)


def test_a_batch_with_one_strided_element_has_a_checksum() -> None:
    assert checksum(torch.arange(6.0)[::3][:1]) == checksum(torch.tensor([0.0]))


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_bytes_of_a_sparse_tensor_are_its_places_and_values(layout: torch.layout) -> None:
    with torch.sparse.check_sparse_tensor_invariants(True):
        one, same, moved, other = (
            made.to_sparse(layout=layout)
            for made in (torch.eye(3), torch.eye(3), torch.eye(3).flip(0), 2 * torch.eye(3))
        )
    assert torch.equal(bytes_view(one), bytes_view(same))
    assert not torch.equal(bytes_view(one), bytes_view(moved))
    assert not torch.equal(bytes_view(one), bytes_view(other))
