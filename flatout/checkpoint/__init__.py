"""Atomic, exact save and resume: what a run is made of, on the disk whole or not at all, in safetensors and JSON.

    checkpoints = Checkpoints("runs/digits", keep_last=3, best="min", asynchronous=True)
    if (loaded := checkpoints.load()) is not None:
        restore(loaded, step, batches, ema=average)
    for batch in batches:
        loss = step(batch)
        ...
        checkpoints.save(capture(step, batches, ema=average), step=step.steps)

`step` is a TrainStep; without one the parts are given by name: model=, optimizer=, scheduler=, scaler=, data=.
Of several ranks each calls all of it: `capture` takes the random states of every rank, and rank 0 writes.

`capturing` and `restoring` go between live objects and a state, `folder` between a state and the disk.
"""
