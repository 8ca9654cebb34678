"""Signals that a supervisor receives, and names of those that end its tasks. No TensorFlow here."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def heeded(on_signal: Callable[[int], object]) -> Iterator[None]:
    """Calls a function with the number of each SIGINT, SIGTERM and SIGHUP. What is ignored stays so, as under nohup."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, lambda number, frame: on_signal(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_name(number: int) -> str:
    """Returns `SIGKILL` for 9, and a text for numbers without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
