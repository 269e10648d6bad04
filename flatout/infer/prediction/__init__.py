"""Any number of inputs through a model: predict, and what it is made of."""
