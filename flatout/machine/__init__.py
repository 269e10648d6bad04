"""What this machine is, what it can do at most, and how its devices are timed."""
