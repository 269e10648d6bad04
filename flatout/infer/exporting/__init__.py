"""Exporting a model to files that run without its source, each verified."""
