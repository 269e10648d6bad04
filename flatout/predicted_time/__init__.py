"""What a training step would take elsewhere, or otherwise: on GPUs that are not here, under another plan, batch size or
number of threads.

`replayed` follows one step that is not taken and times its operators one by one on this machine, `gpu_rates` says what
GPUs make of them, `predicting` puts all together, and `prediction` is the result.
"""
