"""Each lever against the same optimization written by hand: `python -m benchmarks.search.manual`."""
