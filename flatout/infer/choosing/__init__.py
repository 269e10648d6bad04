"""Which levers of inference help: tune_inference, and what it is made of."""
