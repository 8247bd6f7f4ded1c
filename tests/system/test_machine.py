"""What the machine has: container limits, processor, memory bandwidth."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from swiftgen.system import cgroups, cpuinfo, machine
from swiftgen.system.errors import SwiftgenError

CPUINFO = """processor\t: 0
model name\t: Some Processor 9
flags\t\t: fpu sse avx2 avx512f amx_bf16

processor\t: 1
model name\t: Another
"""


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of control groups; this process is in a/b of both versions, and in c for processor time."""
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/c\n4:memory:/a/b\n0::/a/b\n", encoding="utf-8")
    monkeypatch.setattr(cgroups, "_OWN", own)
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "groups")
    return tmp_path / "groups"


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n", encoding="ascii")


def test_memory_of_a_container(groups: Path):
    for folder, limit in ((groups / "a" / "b", "max"), (groups / "a", "1000")):
        put(folder, memory__max=limit, memory__current="700", memory__stat="anon 1\ninactive_file 150")
    assert list(cgroups.memory_left_bytes()) == [450]


def test_memory_of_an_old_container(groups: Path):
    names = {"memory__limit_in_bytes": "900", "memory__usage_in_bytes": "300"}
    put(groups / "memory" / "a" / "b", **names, memory__stat="total_inactive_file 50")
    assert list(cgroups.memory_left_bytes()) == [650]


def test_processor_time_of_a_container(groups: Path, monkeypatch: pytest.MonkeyPatch):
    put(groups / "a" / "b", cpu__max="150000 100000")
    put(groups / "a", cpu__max="max 100000")
    assert list(cgroups.cpu_limits()) == [1.5]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert machine.usable_cores() == 1.5
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert machine.usable_cores() == 1


def test_processor_time_of_an_old_container(groups: Path):
    put(groups / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert list(cgroups.cpu_limits()) == []
    put(groups / "cpu" / "c", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert list(cgroups.cpu_limits()) == [0.5]


def test_no_limits_where_there_are_no_groups(groups: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cgroups, "_OWN", groups / "nowhere")
    assert list(cgroups.cpu_limits()) == list(cgroups.memory_left_bytes()) == []


def test_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpuinfo, "_CPUINFO", tmp_path / "cpuinfo")
    assert machine.vector_units() == []
    assert machine.processor_name()  # from the platform
    (tmp_path / "cpuinfo").write_text(CPUINFO, encoding="utf-8")
    assert machine.processor_name() == "Some Processor 9"
    assert machine.vector_units() == ["avx2", "avx512f", "amx_bf16"]


def test_bandwidth_is_bytes_by_seconds(monkeypatch: pytest.MonkeyPatch):
    ticks = itertools.count(step=0.5)  # every read takes half a second by this clock
    monkeypatch.setattr("swiftgen.system.machine.time.perf_counter", lambda: next(ticks))
    assert machine.read_gb_per_s(num_bytes=4_000_000) == pytest.approx(0.008)


def test_bandwidth_takes_a_quarter_of_what_is_free_at_most(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "free_bytes", lambda _: 2**30)
    sizes: list[int] = []
    ones = machine.torch.ones
    monkeypatch.setattr(
        "swiftgen.system.machine.torch.ones", lambda n, device: sizes.append(4 * n) or ones(9)
    )
    machine.read_gb_per_s()
    assert sizes == [2**28]
    monkeypatch.setattr(machine, "free_bytes", lambda _: 2**28)
    with pytest.raises(SwiftgenError, match="too little free memory"):
        machine.read_gb_per_s()
