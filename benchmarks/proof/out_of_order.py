"""`python out_of_order.py script.py`: the script, with gradients that differ by rounding errors from run to run.

As on a GPU, whose threads add in no fixed order: nothing seeds that.
"""

import os
import runpy
import sys

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

ROUNDING = 1e-7
generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))


def add_rounding(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(1 + ROUNDING * torch.randn(parameter.grad.shape, generator=generator))


def registered(module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
    if parameter is not None and parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(add_rounding)


if __name__ == "__main__":
    register_module_parameter_registration_hook(registered)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
