"""One search for what makes something faster, whatever it is: a script, a training step, a model with inputs.

search      what is tried, in which order, and what is kept; a subclass says how one change is measured
trial       the results it leaves
lines       those results in words
deadline    the time it has
"""
