"""The training library beside hand-written loops and its peers."""
