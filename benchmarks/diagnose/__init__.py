"""Small training scripts with one fault each, their corrected versions, and what `flatout profile` says of them."""
