"""Hooks on the tensors that are saved for the backward pass: each is packed and unpacked once."""

import torch
from small import digest, net, train

packed = unpacked = 0


def pack(tensor):
    global packed
    packed += 1
    return tensor.clone()


def unpack(tensor):
    global unpacked
    unpacked += 1
    return tensor


model = net()
with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
    train(model, 60)
print(packed, unpacked, digest(model))
