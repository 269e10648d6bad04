"""What watching costs a step, by turns in one process."""
