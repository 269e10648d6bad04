"""Serving: ragged batches, generation, their choices, and export."""
