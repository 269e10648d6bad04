"""Stands in for torchvision: the few names that the public scripts use, on generated images.

Samples, transforms and their use of torch's random numbers follow the real package's behaviour, with numpy arrays in
the place of PIL images: what a training step waits for is of the same kind and size.
"""

from torchvision import datasets, transforms, utils

__version__ = "0.0+standin"
__all__ = ["datasets", "transforms", "utils"]
