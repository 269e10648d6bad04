"""What is imported when a script begins, and after torch."""

import sys

at_start = {name for name in sys.modules if name.partition(".")[0] != "flatout"}
for name in ("json", "statistics", "dataclasses", "inspect", "typing", "threading", "subprocess", "random", "csv"):
    print(name, name in at_start)
import torch

print(torch.__version__, "torch._dynamo" in sys.modules, "torch.utils.flop_counter" in sys.modules)
