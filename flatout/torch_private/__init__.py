"""The only place that uses torch's private APIs. Each entry says why no public API will do.

    lookup           how a name is looked up, and the error where this torch lacks it
    attributes       attributes of torch's objects, by name; imports nothing
    late             `dispatch` and `tensors`, for code that is imported before torch
    dispatch         modes of the dispatcher, autograd's state, nests of tensors
    tensors          operators, tensors and their storages
    fake_tensors     tensors that have shapes and no memory
    modules          layer classes, and torch's hooks around all optimizers
    loading          the DataLoader's iterators and fetchers
    ranks            the store that ranks share
    compiler         TorchDynamo and Inductor; imports them only when called
    ahead_of_time    AOT autograd's graphs; importing it imports the compiler

Seen in torch 2.13 (CPU) and 2.15 (CUDA), unless an entry names other versions. Importing this package imports nothing.
Every module in it but `lookup`, `attributes`, `late` and `compiler` imports torch, `ahead_of_time` the compiler too.

Names are re-exported and not wrapped: code that runs for every operator or step calls torch directly. Attributes of
objects are read with `operator.attrgetter`, which is C as well.

Some private names may be used anywhere, since programs and torch's own documentation use them by these names:

    module._parameters, _buffers, _modules, _non_persistent_buffers_set    the dicts that make up an nn.Module
    module._forward_hooks, _forward_pre_hooks, _backward_hooks, ...        its hooks
    tensor._version                                                        the counter of changes in place

Fragments of torch's file names (`/torch/_dynamo/`) are compared in tracebacks. They access nothing: where a file moves,
a message gets less exact.
"""
