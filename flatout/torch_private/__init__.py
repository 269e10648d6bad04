"""The only place that uses torch's private APIs. Each entry says why a public API is not enough.

    lookup           resolves a name; the error for one that this torch lacks
    attributes       names of attributes of torch's objects; imports nothing
    late             access to `dispatch` and `tensors` from code that is imported before torch
    dispatch         dispatcher modes, autograd state, pytrees
    tensors          operators, tensors and their storages
    fake_tensors     tensors with shapes but no memory
    modules          base classes of layers, hooks of optimizers
    loading          iterators and fetchers of the DataLoader
    graphs           what nodes of an autograd graph have saved; imports nothing
    ranks            the store shared by all ranks
    compiler         TorchDynamo and Inductor, imported only when called
    ahead_of_time    graphs of AOT autograd; importing it imports the compiler

Seen in torch 2.13 (CPU) and 2.15 (CUDA), unless an entry names other versions. Importing this package imports nothing.
Every module in it but `lookup`, `attributes`, `graphs`, `late` and `compiler` imports torch, `ahead_of_time` the
compiler too.

Names are re-exported, not wrapped, so code that runs for every operator or step calls torch directly. Attributes of
objects are read with `operator.attrgetter`, which is implemented in C.

Some private names may be used anywhere, because many programs depend on them and torch keeps them stable:

    module._parameters, _buffers, _modules, _non_persistent_buffers_set    the dicts that an nn.Module consists of
    module._forward_hooks, _forward_pre_hooks, _backward_hooks, ...        its hooks
    tensor._version                                                        counts in-place changes

File names of torch (`/torch/_dynamo/`) are compared with those in tracebacks; names of operators are keys of tables.
Neither accesses anything: if torch renames one, a message is less precise, or an entry of a table is never matched.
"""
