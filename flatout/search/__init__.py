"""One search for what makes something faster, whatever it is: a script, a training step, a model with inputs.

search      what is tried, in which order, what is kept and what goes again; a subclass says how one change is measured
trial       the values that it leaves behind
lines       these in words
deadline    the time that it has
"""
