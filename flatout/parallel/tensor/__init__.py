"""Tensor parallel: every layer's work is shared by all ranks, which train on the same batch.

    rules         which matrices of which modules are cut, and along which dimension
    parts         one rank's part of a tensor, the whole from the parts; sums and gathers of activations, and gradients
    scores        scores of all tokens that no rank has as a whole, and their cross-entropy
    layers        the layers that compute with a part of their weights
    random        random numbers: the same on all ranks, but for what each rank computes alone
    splitting     plans the cut of a whole model, and carries it out
    training      what a training step has to know of it
    with_fsdp     the same among neighbouring ranks, whose parts FSDP2 shards over the others

Importing this imports nothing.
"""
