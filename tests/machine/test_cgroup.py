from pathlib import Path

from flatout.machine.cgroup import read_cgroup


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_version_two_takes_the_smallest_limit_of_all_ancestors(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "self": "0::/pod/job",
            "fs/pod/cpu.max": "150000 100000",
            "fs/pod/job/cpu.max": "max 100000",
            "fs/pod/job/memory.max": "8000000000",
            "fs/pod/memory.max": "4000000000",
            "fs/pod/memory.current": "3000000000",
            "fs/pod/memory.stat": "anon 1\ninactive_file 1000000000",
        },
    )
    found = read_cgroup(tmp_path / "self", tmp_path / "fs")
    assert (found.quota_cores, found.memory_limit_bytes, found.memory_used_bytes) == (1.5, 4_000_000_000, 2_000_000_000)


def test_version_one_keeps_a_tree_for_each_controller(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "self": "4:memory:/docker/ab\n2:cpu,cpuacct:/docker/ab\n1:name=systemd:/",
            "fs/cpu/cpu.cfs_quota_us": "200000",  # a container mounts its own group as the root: the path is not there
            "fs/cpu/cpu.cfs_period_us": "100000",
            "fs/memory/docker/ab/memory.limit_in_bytes": "9223372036854771712",
            "fs/memory/memory.limit_in_bytes": "1000",
            "fs/memory/memory.usage_in_bytes": "900",
            "fs/memory/memory.stat": "inactive_file 5\ntotal_inactive_file 400",
        },
    )
    found = read_cgroup(tmp_path / "self", tmp_path / "fs")
    assert (found.quota_cores, found.memory_limit_bytes, found.memory_used_bytes) == (2.0, 1000, 500)


def test_no_limits_and_no_cgroups_are_none(tmp_path: Path) -> None:
    write(tmp_path, {"self": "0::/", "fs/cpu.max": "max 100000", "fs/memory.max": "max"})
    for file in ("self", "absent"):
        found = read_cgroup(tmp_path / file, tmp_path / "fs")
        assert (found.quota_cores, found.memory_limit_bytes, found.memory_used_bytes) == (None, None, None)
