"""The gain that tune states, beside what a user gets: see `__main__`."""
