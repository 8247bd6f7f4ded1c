"""swiftgen: very long documents from a local language model, faster, and exactly what AR would write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swiftgen.system.version import __version__

if TYPE_CHECKING:
    from swiftgen.decoding.decode import StepEvent
    from swiftgen.engine import Engine, load

__all__ = ["Engine", "StepEvent", "__version__", "load"]

_HOMES = {"Engine": "swiftgen.engine", "load": "swiftgen.engine", "StepEvent": "swiftgen.decoding.decode"}


def __getattr__(name: str) -> Any:
    """Import PyTorch only when it is needed: `swiftgen --help` must answer at once."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
