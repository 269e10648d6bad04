"""Flatout runs PyTorch flat out on the machine at hand, and proves it."""

__version__ = "0.1.0"
