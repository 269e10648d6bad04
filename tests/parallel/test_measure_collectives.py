"""Ranks that measure together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flatout.decoding import decode
from flatout.machine.ranks import Ranks
from flatout.parallel import measure_collectives
from flatout.parallel.measure_collectives import COLLECTIVES, measure
from flatout.parallel.preflight import judged
from flatout.parallel.rank_timings import Timings
from flatout.report.preflight_text import preflight_text
from tests.train.conftest import RunRanks

MEASURE = """
import json, warnings
from dataclasses import asdict
from pathlib import Path
from flatout.machine.ranks import Ranks
from flatout.parallel.measure_collectives import measure
warnings.simplefilter("error")
seconds, largest, out = float(sys.argv[4]), int(sys.argv[5]), sys.argv[6]
here = Ranks(rank=rank, count=ranks, local_rank=rank, device=torch.device("cpu"))
found = measure(here, seconds=seconds, sizes=[1000, 4096, largest])
Path(f"{out}.{rank}").write_text(json.dumps(asdict(found)))
leave()
"""


def measured(folder: Path, ranks: int) -> list[Timings]:
    return [decode(Timings, json.loads((folder / f"found.{rank}").read_text())) for rank in range(ranks)]


@pytest.mark.slow
def test_all_ranks_find_the_same(run_ranks: RunRanks, tmp_path: Path) -> None:
    ended = run_ranks(MEASURE, 3, 1.0, 16_384, tmp_path / "found")
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    first, *others = measured(tmp_path, 3)
    for other in others:
        assert (other.ranks, other.collectives, other.pairs) == (first.ranks, first.collectives, first.pairs)
    assert [one.name for one in first.collectives] == list(COLLECTIVES)
    for one in first.collectives:
        # Of three ranks, each has an equal part.
        assert [size.size_bytes for size in one.sizes][:2] == [1008, 4104][: len(one.sizes)]
        assert one.missing or len(one.sizes) == 3
        assert all(seconds > 0 for size in one.sizes for seconds in size.samples_seconds)
    assert first.pairs_missing or [one.ranks for one in first.pairs] == [(0, 1), (0, 2), (1, 2)]
    assert [(one.rank, one.machine, one.device) for one in first.ranks] == [(0, 0, "cpu"), (1, 0, "cpu"), (2, 0, "cpu")]
    assert len({one.threads for one in first.ranks}) == 1
    assert preflight_text(judged(first)).startswith("ranks           3 on 1 machine · cpu · gloo\n")


@pytest.mark.slow
def test_what_would_take_too_long_is_left_out(run_ranks: RunRanks, tmp_path: Path) -> None:
    """No time at all: everything is measured at the smallest size, and one pair."""
    ended = run_ranks(MEASURE, 3, 1e-9, 1 << 30, tmp_path / "found")
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    found = measured(tmp_path, 3)[1]
    for one in found.collectives:
        assert len(one.sizes) == 1
        assert one.missing == "4 KiB and more would take longer than the time that is left"
    assert found.pairs_missing == "1 of 3 pairs were measured when the time was up"
    assert [one.ranks for one in found.pairs] == [(0, 1)]


def test_a_rank_alone_multiplies() -> None:
    threads = torch.get_num_threads()
    found = measure(Ranks(rank=0, count=1, local_rank=0, device=torch.device("cpu")), seconds=0.5)
    assert torch.get_num_threads() == threads
    assert len(found.ranks[0].product_seconds) >= 3
    assert (found.collectives, found.pairs, found.backend) == ((), (), "none")
    text = preflight_text(judged(found))
    assert text.startswith("ranks           1 on 1 machine · cpu\n")
    assert "unknown         ranks and links: there is one rank" in text


def test_the_module_writes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    measure_collectives.main([str(tmp_path / "found.json"), "0.2"])
    assert len(decode(Timings, json.loads((tmp_path / "found.json").read_text())).ranks) == 1


def test_ranks_that_do_not_find_each_other_end_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match=r"preflight: RANK .*set, but not WORLD_SIZE"):
        measure_collectives.main([str(tmp_path / "found.json")])


WITHOUT_OLD_NAMES = """
for old, new in (("all_gather_into_tensor", "all_gather_single"), ("reduce_scatter_tensor", "reduce_scatter_single")):
    if hasattr(distributed, new):
        delattr(distributed, old)
"""


def test_collectives_are_called_by_the_names_that_this_torch_has(run_ranks: RunRanks, tmp_path: Path) -> None:
    for code, _, errors in run_ranks(WITHOUT_OLD_NAMES + MEASURE, 2, 0.2, 8192, tmp_path / "found"):
        assert (code, errors) == (0, "")
