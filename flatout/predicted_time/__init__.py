"""What a training step would take elsewhere, or otherwise: on GPUs that are not here, under another plan, batch size or
number of threads.

`fake_steps` follows one step that is not taken, `gpu_rates` says what GPUs make of its operators, `replayed` times them
one by one on this machine, `predicting` puts all together, and `prediction` is the result.
"""
