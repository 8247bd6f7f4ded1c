"""What the cgroups above this process leave it: the limits of a container (Linux, versions 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def memory_left_bytes() -> Iterator[int]:
    """The memory that each group with a limit still gives; file pages in the cache are given up on demand."""
    for folder, is_v2 in _folders("memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if not is_v2:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit_name, usage_name, cache_name = names
        try:
            limit = (folder / limit_name).read_text(encoding="ascii").strip()
            if limit != "max":
                usage = int((folder / usage_name).read_text(encoding="ascii"))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines())
                yield max(0, int(limit) - usage + int(stat.get(cache_name, 0)))
        except (OSError, ValueError):
            pass  # not visible from inside the container


def cpu_limits() -> Iterator[float]:
    """The processor time that each group with a limit gives, in cores; it may be a fraction."""
    for folder, is_v2 in _folders("cpu"):
        try:
            if is_v2:
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
                period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
            if quota != "max" and int(quota) > 0:
                yield int(quota) / int(period)
        except (OSError, ValueError):
            pass


def _folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """The groups of this process, from its own up to the root, and whether they are of version 2."""
    try:
        lines = _OWN.read_text(encoding="utf-8").splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = _ROOT / controller if controllers else _ROOT
            folder = root / path.lstrip("/")
            while folder == root or folder.is_relative_to(root):
                yield folder, not controllers
                folder = folder.parent
