"""What size a training can and should have: its memory before it runs, the batch that fits, a plan for less memory.

flatout.forecast(step, batch)                  # the peak of a step, without running it
flatout.largest_batch(step, batch)             # the most samples that fit, proved by real steps
flatout.fit_to_memory("12 GiB", step, batch)   # the plan that stays below a limit and costs the least time
flatout.batch_curve(step, batch)               # speed and memory against the batch size
"""
