"""How several ranks best share the training of one model: each strategy predicted, tried, and proved.

made.py         the step and the batches that a function of the user makes for a plan
told.py         what a process that trains with them is told
trainer.py      that process: one of several ranks, or alone
facts.py        what one process finds out before anything is tried: sizes, times, forecasts of memory
prediction.py   what a step would take under each strategy, from those times and what was measured between ranks
sides.py        one process, or ranks under a strategy, as trials whose steps are timed
proving.py      that ranks train as one process
choosing.py     the order of everything, within the budget
found.py        what was predicted, tried and proved, and the plan
"""
