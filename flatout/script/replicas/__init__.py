"""Several ranks that train one unmodified script: each runs all of it, on its own share of every training batch.

    settings.py        what the ranks are told, and what they leave for the parent: facts, and why they cannot go on
    rank.py            a rank's process before the script's first line: files, variables, its GPU, seeds
    replica.py         one rank of a script: what its parts have in common, from its start to its end
    training_data.py   which loaders feed training, and the rank's share of what they hand out
    training_steps.py  calls of models, backward passes, gradients and updates
    streams.py         random numbers: common to all ranks for the order of the data, a rank's own for dropout
    gradients.py       the mean of the ranks' gradients
    agreement.py       what ranks compare before each exchange, so that ranks that part say so and none waits for ever
    losses.py          how much a rank's loss counts in that of the whole batch
    starting.py        the parent: the ranks started and awaited
    trial_rank.py      a rank of a trial: recorded for the proof (flatout.tuning.devices_proof), or timed on command
                       (flatout.tuning.devices)

Nothing of the script is rewritten. Every rank runs the same lines with the same seeds; only what a training loader
hands out differs. So the ids in a batch of all ranks are those of the run on one device, whatever the sampler (until
dropout on the CPU would have moved the generator that the sampler draws from), and whatever is not training
(evaluation, checkpoints, early stopping) is done by every rank, with the same figures.
"""
