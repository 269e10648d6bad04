"""An import hook of the script's own, and modules that it removes and imports anew."""

import importlib
import sys


class Tracing:
    seen = []

    def find_spec(self, name, path=None, target=None):
        if name in ("csv", "statistics", "colorsys"):
            self.seen.append(name)
        return None


sys.meta_path.insert(0, Tracing())
import colorsys
import csv
import statistics

first = statistics
del sys.modules["statistics"]
import statistics

print(Tracing.seen, first is statistics, importlib.reload(csv) is csv, colorsys.__spec__.name)
print(statistics.__spec__.origin == first.__spec__.origin, type(csv.__loader__).__name__, csv.__spec__.has_location)
