"""Feeding a loop: whole-batch indexing of in-memory data."""
