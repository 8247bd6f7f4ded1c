"""SIGINT, SIGTERM and SIGHUP: a run finishes its step, saves everything and says how to go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from swiftgen.system.ranks import num_ranks, of_leader

_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]  # no SIGHUP on Windows


class StopRequested(KeyboardInterrupt):
    """A signal asked the process to end.

    Attributes:
        exit_code: 128 and the number of the signal, as a shell reports it.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


class StopSignals:
    """Turns the signals that end a program into `StopRequested`; use it as a context manager.

    It is raised at once, or, inside `deferred`, by the next `check`. A second signal is always raised at
    once. Signals that are ignored (as nohup does) stay ignored.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._is_deferred = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, the first signal waits for `check`."""
        self._is_deferred = True
        try:
            yield
        finally:
            # Several ranks end alike, when rank 0 does; torchrun signals all of them, more than once.
            self._is_deferred = num_ranks() > 1

    def check(self) -> None:
        """Raises StopRequested if a signal has come; of several ranks, to rank 0."""
        if received := int(of_leader(float(self._received or 0))):
            raise StopRequested(received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_first = self._received is None
        self._received = number
        if not (self._is_deferred and (is_first or num_ranks() > 1)):
            raise StopRequested(number)
