"""Ranks that tell each other their addresses through a folder that all of them see. No TensorFlow here."""

from __future__ import annotations

import errno
import os
import pathlib
import time

from tfdist.errors import ClusterError
from tfdist.runtime.files import read_file
from tfdist.runtime.log import logger

_REPORT_EVERY = 10.0
_PASSING = (
    errno.ESTALE,
    errno.EIO,
    errno.EACCES,
    errno.EAGAIN,
)  # of a file that has just been renamed, on storage of a network


def exchange(folder: str, job: str, rank: int, size: int, address: str, timeout: float) -> list[str]:
    """Returns the addresses of all ranks, in order, once all have written theirs.

    Args:
        folder: One that all ranks share; each job has a folder of its own in it.
        job: What only this start of this job is called.
        rank: This process's, from 0.
        size: How many there are.
        address: This process's.
        timeout: Seconds to wait for the others.

    Raises:
        ClusterError: Some rank's address is not there after `timeout`, or is no address, or the folder cannot be written.
    """
    place = pathlib.Path(folder, f"{job}-{size}")
    try:
        place.mkdir(parents=True, exist_ok=True)
        partial = place / f".{rank}.{os.getpid()}"
        partial.write_text(address)
        partial.replace(place / str(rank))
    except OSError as e:
        raise ClusterError(f"rank {rank} cannot write its address to {place}: {e.strerror or e}.") from e
    found: dict[int, str] = {}
    began = reported = time.monotonic()
    while True:
        for other in set(range(size)) - set(found):
            try:
                if text := read_file(place / str(other)).decode():
                    found[other] = text
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as e:
                if getattr(e, "errno", None) in _PASSING:
                    continue
                raise ClusterError(
                    f"the address of rank {other} cannot be read from {place / str(other)}: {getattr(e, 'strerror', None) or e}. "
                    "Remove that folder, and start again."
                ) from e
        if len(found) == size:
            return [found[other] for other in range(size)]
        missing = ", ".join(map(str, sorted(set(range(size)) - set(found))))
        if (now := time.monotonic()) - began > timeout:
            raise ClusterError(
                f"Waited {timeout:.0f} s for the addresses of rank {missing} in {place}. Are they started, and do all hosts "
                "share this folder?"
            )
        if now - reported >= _REPORT_EVERY:
            logger.info(f"waiting for the addresses of rank {missing} in {place}")
            reported = now
        time.sleep(0.1)
