"""A model as files that run without its source, each verified: export, and what it is made of."""
