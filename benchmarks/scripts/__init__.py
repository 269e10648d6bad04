"""Public training scripts, unmodified, as the workloads that Flatout must not break and should make faster."""
