"""Scripts beside their twins changed by hand: `python -m benchmarks.search.twins`."""
