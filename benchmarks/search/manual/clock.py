"""Arguments and step times, shared by the scripts in this folder."""

import argparse
import json
import time

import torch

_parser = argparse.ArgumentParser()
_parser.add_argument("--by-hand", action="store_true", help="run the version optimized by hand")
_parser.add_argument("--steps", type=int, default=200)
_parser.add_argument("--times", help="a file for when the steps ended, in seconds on the machine's clock")
arguments = _parser.parse_args()
BY_HAND = arguments.by_hand
torch.manual_seed(0)
_ends = []


def begin():
    if arguments.times:
        open(arguments.times, "w").close()  # tells that training begins
    _ends.append(time.perf_counter())


def step_ended():
    """Whether training is over."""
    _ends.append(time.perf_counter())
    over = len(_ends) > arguments.steps
    if over and arguments.times:
        with open(arguments.times, "w") as file:
            json.dump(_ends, file)
    return over
