"""Is the search near the best of all combinations, and at what share of the cost of trying them all?"""
