"""Several ranks: whether they train what one process trains, what they cost, and what the planner predicts."""
