"""What the workers of a cluster tell each other before they have a transport of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.collectives.ranks import Ranks
from tfdist.compat import tf_cluster
from tfdist.errors import truncate

_SECONDS = 60.0  # for which a worker's text is waited for, which it has published before


@dataclasses.dataclass(frozen=True)
class Meeting:
    """What connects the workers of a new transport.

    Attributes:
        name: Another one for each meeting, the same on all workers.
        ranks: Exchanges numbers among the workers.
        workers: The names of all.
        addresses: `host:port` of each.
        timeout_seconds: How long an exchange may take; 0 means for ever.
    """

    name: str
    ranks: Ranks
    workers: Sequence[str]
    addresses: Sequence[str]
    timeout_seconds: float

    def texts(self, what: str, mine: str) -> list[str]:
        """Returns each worker's text. A collective.

        Args:
            what: What it is about; another one at each call.
            mine: This worker's.
        """
        key = f"{self.name}/{what}"
        put(f"{key}/{self.ranks.rank}", f"{mine} ")  # TensorFlow takes no empty text
        self.ranks.barrier()
        return [get(f"{key}/{rank}", _SECONDS)[:-1] for rank in range(self.ranks.size)]

    def first_reason(self, what: str, mine: str) -> str:
        """Returns the first worker's text that is not empty, and whose it is unless it is all workers'. A collective.

        Args:
            what: As of `texts`.
            mine: This worker's.
        """
        texts = self.texts(what, mine)
        first = next(filter(None, texts), "")
        who = [worker for worker, text in zip(self.workers, texts, strict=True) if text == first]
        return first if len(who) == self.ranks.size else f"{first} ({truncate(', '.join(who))})"


def put(key: str, text: str) -> None:
    """Makes a text known to all workers, for ever."""
    tf_cluster.publish(key, text)


def get(key: str, seconds: float) -> str:
    """Returns the text of a key, or raises TensorFlow's error when there is none within some seconds."""
    return tf_cluster.published(key, max(1, int(1000 * seconds)))
