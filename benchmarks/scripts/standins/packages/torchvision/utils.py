"""save_image without PIL: the images side by side as one portable graymap or pixmap, whatever the file is called."""

import os

import torch
from torch import Tensor


def save_image(images: Tensor, path: str | os.PathLike[str], nrow: int = 8) -> None:
    """Images [count, channels, height, width] between 0 and 1, so many to a row."""
    count, channels, height, width = images.shape
    rows = -(-count // nrow)
    grid = torch.zeros(channels, rows * height, nrow * width)
    for number, image in enumerate(images):
        top, left = number // nrow * height, number % nrow * width
        grid[:, top : top + height, left : left + width] = image
    pixels = grid.mul(255).add(0.5).clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous()
    kind = "P5" if channels == 1 else "P6"
    with open(path, "wb") as file:
        file.write(f"{kind} {nrow * width} {rows * height} 255\n".encode())
        file.write(pixels.numpy().tobytes())
