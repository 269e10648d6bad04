"""Cleaning up; reading mountinfo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flatout.errors import TrialError
from flatout.script.isolation import cleanup, mounts


def test_cleanup_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    scratch = tmp_path / "scratch"
    (scratch / "layers" / "0" / "work" / "work").mkdir(parents=True)
    (scratch / "layers" / "0" / "work" / "work" / "left").write_text("x")
    (scratch / "layers" / "0" / "work" / "work").chmod(0)
    (scratch / "away").symlink_to(tmp_path / "kept")
    os.mkfifo(scratch / "pipe")
    cleanup(scratch)
    assert not scratch.exists()
    assert (tmp_path / "kept" / "file").exists()
    cleanup(scratch)  # a second time there is nothing to do


def test_cleanup_refuses_a_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "scratch").symlink_to("kept")
    with pytest.raises(TrialError, match="is not a directory"):
        cleanup(tmp_path / "scratch")
    assert (tmp_path / "kept").exists()


MOUNTINFO = r"""
20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
21 20 0:5 / /dev rw,nosuid - devtmpfs devtmpfs rw
22 20 8:2 / /mnt/my\040disk rw,nodev shared:7 master:1 - xfs /dev/sdb1 rw
23 20 8:3 / /data rw - ext4 /dev/sdc1 ro
24 23 8:4 / /data/in rw - ext4 /dev/sdd1 rw
25 20 8:5 / /hidden/below rw - ext4 /dev/sde1 rw
26 20 8:6 / /hidden rw - ext4 /dev/sdf1 rw
27 24 8:7 / /data/in rw - ext4 /dev/sdg1 rw
28 20 0:9 / /run/user rw - tmpfs tmpfs rw
29 20 8:9 / /run/media/stick rw - vfat /dev/sdh1 rw
"""


def test_mounts_that_a_path_can_reach() -> None:
    found = {mount.path: mount for mount in mounts.visible(mounts.parse(MOUNTINFO))}
    assert "/hidden/below" not in found
    assert found["/data/in"].source == "/dev/sdg1"
    assert found["/mnt/my disk"].flags == 4
    assert not found["/data"].writable
    assert [path for path in found if mounts.in_kernel_tree(found[path])] == ["/dev"]
