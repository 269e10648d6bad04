"""Run a user's unmodified script: entry, step detection, observation, reversible patches, isolation."""
