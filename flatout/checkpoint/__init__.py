"""Atomic, exact save and resume: what a run is made of, on the disk whole or not at all, in safetensors and JSON.

    checkpoints = Checkpoints("runs/digits", keep_last=3, best="min", asynchronous=True)
    if (loaded := checkpoints.load()) is not None:
        restore(loaded, model=model, optimizer=optimizer, scheduler=scheduler, data=batches)
    for batch in batches:
        ...
        checkpoints.save(
            capture(model=model, optimizer=optimizer, scheduler=scheduler, data=batches, plan=plan),
            step=step,
            metric=loss.item(),
        )

Of several ranks each calls all of it: `capture` takes the random states of every rank, and rank 0 writes.

`capturing` and `restoring` go between live objects and a state, `folder` between a state and the disk.
"""
