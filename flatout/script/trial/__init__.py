"""One trial: the process in which a user's script runs beside the user's own, and its parent."""
