"""Memory: what it is taken by, and what happens when it ends."""
