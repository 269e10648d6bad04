"""A script's own sys.excepthook, which a crash reporter installs."""

import sys


def report(kind, error, trace):
    names = []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    print("crashed:", kind.__name__, error, names, sys.last_value is error)


def inner():
    raise RuntimeError("deep")


sys.excepthook = report
inner()
