"""Several ranks that train one unmodified script: each runs all of it, on its own share of every training batch.

    settings.py        what the ranks are told, and the folder in which they leave what the parent reports
    rank.py            a rank's process before the script's first line: files, variables, its GPU, seeds
    replica.py         one rank of a script: what its parts have in common, from its start to its end
    training_data.py   which loaders feed training, and the rank's share of what they hand out
    training_steps.py  calls of models, backward passes, gradients and updates
    shares.py          the order of a DataLoader, of which a rank takes its share
    streams.py         random numbers: common to all ranks for the order of the data, a rank's own for dropout
    gradients.py       the mean of the ranks' gradients
    agreement.py       what ranks compare before each exchange, so that ranks that part say so and none waits for ever
    losses.py          how much a rank's loss counts in that of the whole batch
    refusal.py         the end of a script that cannot be shared, said once
    starting.py        the parent: the ranks started and awaited
    recorded.py        a rank of a run that is only recorded, for the proof (flatout.tuning.devices_proof)
    commanded.py       a rank of a run whose steps are timed on command (flatout.tuning.devices)

Nothing of the script is rewritten. Every rank runs the same lines with the same seeds; only what a training loader
hands out differs. So the ids in a batch of all ranks are those of the run on one device, whatever the sampler (until
dropout on the CPU would have moved the generator that the sampler draws from), and whatever is not training
(evaluation, checkpoints, early stopping) is done by every rank, with the same figures.
"""
