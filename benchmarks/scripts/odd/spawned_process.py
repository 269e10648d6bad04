"""A process started by spawn imports the script anew."""

import multiprocessing
import sys


def work(queue):
    queue.put((__name__, "flatout" in sys.modules, sys.argv[1:]))


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(queue.get(), process.join(), process.exitcode)
