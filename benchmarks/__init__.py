"""Benchmarks, each a module or package with a docstring that says what it measures.

No tune in them uses what an earlier one measured, nor leaves anything for a later one: each cell starts from the same
knowledge, whatever ran before it. Processes that they start inherit that.
"""

import os

os.environ["FLATOUT_NO_HISTORY"] = "1"
