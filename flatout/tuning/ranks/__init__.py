"""Trials that are groups of ranks: several processes that train together, and get the same commands.

group.py      the parent's end of any such trial, and the answers of all ranks as one
script.py     a script that trains in ranks by itself, as torchrun starts it: what a tune needs of its trials
job.py        a process of ours that starts ranks in a network of their own: the parent's end
job_child.py  ... and its own

Groups of a script that is replicated (`flatout tune --devices`) are in `flatout.tuning.devices.ranks_trial`.
"""
