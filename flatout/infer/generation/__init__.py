"""Text from a causal language model: TokenGenerator, and what it is made of."""
