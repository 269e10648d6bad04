"""Modules of the standard library are whole: what they import is there, and their registries are one."""

import concurrent.futures
import copyreg
import dataclasses
import enum
import functools
import importlib
import importlib.metadata
import inspect
import json
import logging
import pickle
import sys
import threading
import typing


@dataclasses.dataclass
class Point:
    x: int = 0


class Color(enum.Enum):
    RED = 1


class Odd:
    def __init__(self, value):
        self.value = value


copyreg.pickle(Odd, lambda odd: (Odd, (odd.value + 1,)))
print(dataclasses.asdict(Point(3)), pickle.loads(pickle.dumps(Odd(1))).value, pickle.loads(pickle.dumps(Color.RED)))
print(isinstance(functools.partial(print), functools.partial), inspect.getsourcefile(json).endswith("json/__init__.py"))
print([sys.modules[one.__name__] is one for one in (json, logging, typing, threading, inspect, enum, importlib)])
logging.basicConfig(stream=sys.stdout)
logging.warning("logged once")
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    print(list(pool.map(len, ["a", "bb"])), threading.active_count())
late = concurrent.futures.ThreadPoolExecutor(1)
late.submit(lambda: (__import__("time").sleep(0.2), print("joined at the end")))
print(importlib.metadata.version("numpy") != "", importlib.util.find_spec("json").name)
