"""A folder for PYTHONPATH: its `sitecustomize` lets Python processes that a script starts be followed."""
