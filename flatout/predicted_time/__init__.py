"""What a training step would take elsewhere, or otherwise: on GPUs that are not here, under another plan, batch size or
number of threads.

`operators` follows one step, `gpu_rates` says what GPUs make of it, `replayed` times it piece by piece on this machine,
`predicting` puts them together, and `prediction` is the result.
"""
