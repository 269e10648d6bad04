"""Training in which the loop stays the user's: a step, evaluation, and `fit`, which only puts them together."""
