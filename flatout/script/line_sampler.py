"""Where the main thread spends its time, by samples of its stack from a second thread.

A profiler of torch's operators does not show a plot, a log line or a file that is written. A sample costs some ten
microseconds, two hundred times a second. The samples are weighted with the time since the one before: while the main
thread holds the interpreter's lock for long, as in some C code, the sampler has to wait.

    sampler = LineSampler(Places(folder), threading.get_ident())
    sampler.start()
    ...
    sampler.stop()
    sampler.times(steps=20)
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from types import FrameType

from flatout.script.behaviour_seen import Activity, LineTime
from flatout.script.places import Places, line_number
from flatout.tracebacks import installed_package

INTERVAL_SECONDS = 0.004
SWITCH_SECONDS = 0.001
"""How long a thread may hold the interpreter's lock while others wait; Python's default would blur the samples."""
MOST_LINES = 40
LONGEST_WEIGHT_SECONDS = 5.0

_TAGS: tuple[tuple[str, str], ...] = (
    ("/torch/utils/data/", "loader"),
    ("/torch/optim/", "optimizer"),
    ("/torch/autograd/", "backward"),
    ("/torch/nn/modules/module.py", "model"),
    ("/torch/utils/tensorboard/", "logging"),
    ("/tensorboard/", "logging"), ("/tensorboardX/", "logging"), ("/wandb/", "logging"), ("/mlflow/", "logging"),
    ("/logging/", "logging"), ("/tqdm/", "logging"), ("/rich/", "logging"), ("/loguru/", "logging"),
    ("/torch/_tensor_str.py", "logging"), ("/pprint.py", "logging"),
    ("/matplotlib/", "plotting"), ("/seaborn/", "plotting"), ("/plotly/", "plotting"), ("/imageio/", "plotting"),
    ("/torchvision/utils.py", "plotting"),
    ("/torch/serialization.py", "disk"), ("/pickle.py", "disk"), ("/json/", "disk"), ("/csv.py", "disk"),
    ("/numpy/lib/npyio", "disk"), ("/numpy/lib/_npyio", "disk"), ("/numpy/lib/format", "disk"),
    ("/numpy/lib/_format", "disk"), ("/shutil.py", "disk"), ("/pathlib", "disk"), ("/safetensors/", "disk"),
    ("/h5py/", "disk"), ("/zipfile", "disk"), ("/tempfile.py", "disk"),
    ("/torch/", "torch"),
)  # fmt: skip
_ORDER: tuple[Activity, ...] = ("plotting", "logging", "disk", "optimizer", "backward", "model", "torch")
"""The first of these among the frames below the script's line says what the line was doing."""


class LineSampler:
    """Samples one thread from `start` to `stop`."""

    def __init__(self, places: Places, thread: int) -> None:
        self._places, self._watched = places, thread
        self._sums: dict[tuple[str, int, Activity], tuple[float, int]] = {}
        """(seconds, samples)."""
        self._at_step = dict(self._sums)
        """The same at the end of the last step."""
        self._called: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        """Line -> samples in each installed package that it calls, where the activity is the script's own."""
        self._tags: dict[str, str] = {}
        self._package = functools.cache(installed_package)
        self._over = threading.Event()
        self._sampler: threading.Thread | None = None
        self._switch_seconds = 0.0
        self.own = False
        """Set by the collectors around what they do."""
        self.evaluates: Callable[[], bool] = lambda: False
        """Is the script evaluating now? What its lines compute with tensors then is not in the profiled steps, so it
        cannot be told from their Python."""
        self.waits: Callable[[], bool] = lambda: False
        """Does the script read a value from a GPU now? Then the time is that of what the GPU has still to do, whatever
        the line does with the value."""
        self.paused = False

    def start(self) -> None:
        self._switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_seconds, SWITCH_SECONDS))
        self._sampler = threading.Thread(target=self._run, name="flatout-lines", daemon=True)
        self._sampler.start()

    def stop(self) -> None:
        if self._sampler is None:
            return
        self._over.set()
        self._sampler.join(timeout=1.0)
        self._sampler = None
        if sys.getswitchinterval() == SWITCH_SECONDS:
            sys.setswitchinterval(self._switch_seconds)

    def step_ended(self) -> None:
        self._at_step = dict(self._sums)

    def drop_since_step(self) -> None:
        """Forget what came after the last step: of a script that has ended, it is no part of any."""
        self._sums = dict(self._at_step)

    def times(self, steps: int) -> tuple[LineTime, ...]:
        """The lines with the most time. steps: training steps in the window."""
        total = sum(samples for _, samples in self._sums.values())
        ordered = sorted(self._sums.items(), key=lambda item: -item[1][0])[:MOST_LINES]
        return tuple(
            LineTime(
                line=self._places.line((file, number)),
                activity=activity,
                seconds=seconds / max(1, steps),
                samples=samples,
                low_share=lowest_share(samples, total),
                library=self._library((file, number), samples) if activity == "script" else "",
            )
            for (file, number, activity), (seconds, samples) in ordered
        )

    def _library(self, place: tuple[str, int], samples: int) -> str:
        return next((name for name, inside in self._called[place].items() if inside > samples / 2), "")

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._over.wait(INTERVAL_SECONDS):
            now = time.perf_counter()
            weight, last = min(now - last, LONGEST_WEIGHT_SECONDS), now
            if not self.own and not self.paused:
                self._sample(weight)

    def _sample(self, weight: float) -> None:
        """In a function of its own, so that no frame is held while the thread waits: the frame of a call that has ended
        keeps the call's tensors alive, and torch was seen to fail on tensors that were."""
        frame = sys._current_frames().get(self._watched)
        if frame is not None:
            self.add(frame, weight)

    def add(self, frame: FrameType, seconds: float) -> None:
        """Count one sample of a stack whose innermost frame this is."""
        below: set[str] = set()
        library: str | None = None
        at: FrameType | None = frame
        while at is not None and not self._places.is_users(at.f_code.co_filename):
            file = at.f_code.co_filename
            below.add(self._tag(file))
            library = self._package(file) or library
            at = at.f_back
        if at is None:
            return
        place = (at.f_code.co_filename, line_number(at))
        above: set[str] = set()
        outer = at.f_back
        while outer is not None:
            above.add(self._tag(outer.f_code.co_filename))
            outer = outer.f_back
        activity = _activity(below, above)
        if activity == "script" and self.evaluates():
            activity = "model"
        elif activity in ("script", "logging", "plotting", "disk") and self.waits():
            activity = "torch"
        before, samples = self._sums.get((*place, activity), (0.0, 0))
        self._sums[*place, activity] = before + seconds, samples + 1
        if activity == "script" and library is not None:
            self._called[place][library] += 1

    def _tag(self, file: str) -> str:
        known = self._tags.get(file)
        if known is None:
            known = "" if self._places.is_users(file) else next((tag for part, tag in _TAGS if part in file), "")
            self._tags[file] = known
        return known


def _activity(below: set[str], above: set[str]) -> Activity:
    if "loader" in above:
        return "transform"
    if "loader" in below:
        return "loader"
    found = next((one for one in _ORDER if one in below), None)
    if found is None or found == "torch":
        if "backward" in above:  # a function of the script's own in the backward pass, whose operators have no line
            return "backward"
        return "model" if "model" in above else found or "script"
    return found


def lowest_share(count: int, total: int) -> float:
    """The lower end of Wilson's 95 % interval of a share."""
    if not total:
        return 0.0
    z, share = 1.96, count / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, (middle - half) / (1 + z * z / total))
