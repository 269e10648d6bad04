"""Levers: each one change of how a loop runs, in one flat ordered list (`flatout.levers.catalogue.LEVERS`)."""
