"""What is wrong, what it costs, and what to do about it."""
