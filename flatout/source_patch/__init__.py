"""The choices of a plan as edits of the script's source: `flatout diff`."""
