"""Running a model on many inputs: `predict` and its parts."""
