"""Modules of the script's folder that are named like others."""

import calendar
import csv
import difflib
import os
import resource
import statistics
import sys

import psutil
import tomli_w

sys.path.insert(1, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from small import net, train

for module in (calendar, csv, difflib, resource, statistics, psutil, tomli_w):
    print(module.__name__, module.WHOSE)
print(train(net(), 80).hex(), sys.modules["statistics"] is statistics)
