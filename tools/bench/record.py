"""What a benchmark yields: the raw samples of one case, and where and with what they were taken."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence

import psutil

# What matrix products and 16-bit numbers are computed with, by the kernel's names.
_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile")
_PACKAGES = ("tensorflow", "keras", "tf_keras", "torch", "jax", "jaxlib", "mpi4py", "numpy")


@dataclasses.dataclass
class Record:
    """The samples of one case.

    Attributes:
        bench: The benchmark's name.
        case: What was varied, by name.
        unit: Of the samples.
        samples: By contender, a figure for each round; in a round all contenders had their turn.
        against: The contender to which another's ratio is given, round by round, by the other's name.
        columns: What else there is to say of a contender: by name of the column, by contender.
        facts: Numbers about the case.
        note: A sentence about it.
        date: The day.
        machine: Processor, the instruction sets of it that matter, cores, memory, kernel.
        versions: Of the packages that matter.
    """

    bench: str
    case: dict[str, str | int]
    unit: str
    samples: dict[str, list[float]]
    against: dict[str, str] = dataclasses.field(default_factory=dict)
    columns: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    facts: dict[str, float | None] = dataclasses.field(default_factory=dict)
    note: str = ""
    date: str = dataclasses.field(default_factory=lambda: datetime.date.today().isoformat())
    machine: str = dataclasses.field(default_factory=lambda: _machine())
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: _versions())

    def ratios(self, name: str) -> list[float]:
        """Returns a contender's figures over the other's of the same round."""
        return [a / b for a, b in zip(self.samples[name], self.samples[self.against[name]], strict=True)]


def against(baseline: str, names: Iterable[str]) -> dict[str, str]:
    """Returns `Record.against` for all names, as far as the baseline is one of them."""
    names = list(names)
    return {name: baseline for name in names if name != baseline and baseline in names}


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Returns `median (least to most)`."""
    median = statistics.median(values)
    return f"{median:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def write(path: pathlib.Path, records: Sequence[Record]) -> None:
    """Writes records as JSON lines; those of the same cases that are there already are replaced."""
    known = {json.dumps(record.case): record for record in (read(path) if path.exists() else ())}
    known |= {json.dumps(record.case): record for record in records}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in known.values()))


def read(path: pathlib.Path) -> Iterator[Record]:
    """Yields the records of a file."""
    for line in path.read_text().splitlines():
        yield Record(**json.loads(line))


def _machine() -> str:
    about = pathlib.Path("/proc/cpuinfo").read_text()
    found = re.search(r"model name\s*: (.*)", about)
    flags = re.search(r"flags\s*: (.*)", about)
    sets = " ".join(each for each in _SETS if flags and each in flags[1].split())
    memory = round(psutil.virtual_memory().total / 2**30)
    name = found[1] if found else platform.processor()
    return f"{name}{f' ({sets})' if sets else ''}, {len(os.sched_getaffinity(0))} cores, {memory} GiB, Linux {platform.release()}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
