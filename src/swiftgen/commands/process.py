"""What a command sets for its whole process. The Python API leaves all of it to its user."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swiftgen.engine import Engine
    from swiftgen.settings.schema import Preset


def prepare_process() -> None:
    """No more threads than may run at once, and no warnings from libraries that quantise."""
    from swiftgen.models.libraries import quiet_libraries
    from swiftgen.system.crowding import use_allowed_cores

    use_allowed_cores()
    quiet_libraries()


def load_engine(preset: Preset) -> Engine:
    """`swiftgen.load` in a process that is prepared; on a CPU its threads let others have the cores.

    Raises:
        SwiftgenError: see `swiftgen.load`.
    """
    import swiftgen  # PyTorch comes with it, so not before all else is in order
    from swiftgen.system.crowding import watch_cores

    prepare_process()
    engine = swiftgen.load(preset)
    if engine.opened.device.type == "cpu":
        watch_cores()
    return engine
