"""What Linux says of the processor."""

from __future__ import annotations

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def cpuinfo_lines() -> list[str]:
    """Lines of /proc/cpuinfo; none where there is no such file."""
    try:
        return _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
