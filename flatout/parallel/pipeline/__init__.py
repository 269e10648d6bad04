"""Pipeline parallel: every rank computes some of a model's blocks, and parts of a batch go from rank to rank.

    chain         a model's repeated blocks in their order, and what stands in for those of other ranks
    balance       how many blocks each rank gets, by measured times and bytes
    buffers       a model's buffers around forward passes that only measure
    ownership     which rank trains which parameter, and what becomes of the others
    training      what a training step has to know of it; torch's 1F1B schedule

Importing this imports nothing.
"""
