"""Mutation tests of the proof: see `__main__`."""
