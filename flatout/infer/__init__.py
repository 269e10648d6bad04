"""Inference: prediction on ragged batches, generation, tuning of both, and export."""
