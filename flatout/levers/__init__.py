"""Levers: changes to how a training loop runs, in one flat ordered list (`flatout.levers.catalogue.LEVERS`)."""
