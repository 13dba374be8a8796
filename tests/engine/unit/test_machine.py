"""Memory of this process: the machine's or the control group's, whichever is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex_engine.loop.machine import MachineMemory, read_machine_memory, read_process_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    meminfo = f"MemTotal: {8 << 20} kB\nMemFree: 1 kB\nMemAvailable: {6 << 20} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder: str, limit: object, used: int, cache: int = 0) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cache}\n"
    return {f"{folder}/memory.max": f"{limit}", f"{folder}/memory.current": f"{used}", f"{folder}/memory.stat": stat}


def test_without_a_limit_it_is_the_machine_s(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/pod\n", **group("sys/fs/cgroup/pod", "max", GIB)}
    assert read_machine_memory(write(tmp_path, files)) == MachineMemory(8 * GIB, 6 * GIB)


def test_a_group_s_limit_counts_and_its_page_cache_is_free(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/pod\n", **group("sys/fs/cgroup/pod", 4 * GIB, 3 * GIB, GIB)}
    assert read_machine_memory(write(tmp_path, files)) == MachineMemory(4 * GIB, 2 * GIB)


def test_a_limit_above_the_own_group_counts_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/one\n",
        **group("sys/fs/cgroup/pod/one", 4 * GIB, GIB),
        **group("sys/fs/cgroup/pod", 5 * GIB, 4 * GIB),
    }
    assert read_machine_memory(write(tmp_path, files)) == MachineMemory(4 * GIB, GIB)


def test_in_a_container_the_group_is_the_top(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/of/the/host\n", **group("sys/fs/cgroup", 2 * GIB, GIB)}
    assert read_machine_memory(write(tmp_path, files)) == MachineMemory(2 * GIB, GIB)


def test_the_older_groups_are_read_as_well(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/pod"
    files = {
        "proc/self/cgroup": "5:memory:/pod\n1:cpu,cpuacct:/pod\n",
        f"{folder}/memory.limit_in_bytes": f"{3 * GIB}",
        f"{folder}/memory.usage_in_bytes": f"{2 * GIB}",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    assert read_machine_memory(write(tmp_path, files)) == MachineMemory(3 * GIB, 2 * GIB)


def test_a_group_that_is_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/pod\n", **group("sys/fs/cgroup/pod", GIB, GIB + 5)}
    assert read_machine_memory(write(tmp_path, files)).free_bytes == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_this_process_has_some() -> None:
    assert 0 < read_process_bytes() <= read_process_bytes("VmHWM")
