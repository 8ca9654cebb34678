"""The errors that tfdist raises itself. No TensorFlow here.

Every message names the argument, what was received, what was expected and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """What the user asked for cannot work; carries every fault found, not only the first.

    Args:
        faults: One sentence per fault; at least one.

    Attributes:
        faults: The sentences, as a tuple.
    """

    def __init__(self, faults: str | Iterable[str]):
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__("\n".join(self.faults))


class ClusterError(RuntimeError):
    """The cluster, at run time, is not what the configuration promised."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the known word nearest to `word`, or a full stop."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "."


def unknown(what: str, received: str, known: Iterable[str]) -> str:
    """Returns the sentence for a name that is not in a list of known names."""
    known = sorted(known)
    return f"unknown {what} {received!r}{did_you_mean(received, known)} Known: {', '.join(known)}."
