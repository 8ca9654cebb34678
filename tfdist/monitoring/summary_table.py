"""Prints the end of a run: a table in a terminal, lines `name: value` in a pipe or a file."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from rich import console, table  # Keras has imported it already

from tfdist.errors import printable


def rows(summary: Mapping[str, Any], workdir: pathlib.Path) -> list[tuple[str, str]]:
    """Returns names and values of the table, without values that were not measured.

    Args:
        summary: The summary, from `summary.summarize`, or as read from `summary.json`.
        workdir: The folder that has the run's files.

    Example:
        >>> for name, value in rows(json.loads((workdir / "summary.json").read_text()), workdir):
        ...     print(f"{name}: {value}")
    """
    asynchronous = "retried_steps" in summary  # of parameter servers: a step is one worker's
    compression = summary["compression"]["name"]
    sent, step = summary["wire_bytes_per_step"], summary["step_ms"]
    before, goodput = sent.get("before_compression", {}), summary["goodput"]
    found = [
        ("task", summary["task"]),
        ("strategy", summary["strategy"]),
        ("workers" if asynchronous else "replicas", summary["num_replicas"]),
        ("batch per worker" if asynchronous else "batch", summary["batch_size"]),
        *((name, _metric(value)) for name, value in summary["metrics"].items()),
        ("examples/s", summary["examples_per_second"]),
        ("step median ms", step["median"]),
        ("step p95 ms", step["p95"]),
        ("compression", None if compression == "none" else compression),
        ("bytes per step predicted", sent["predicted"]),
        ("bytes per step measured", sent["measured"]),
        ("bytes per step before compression predicted", before.get("predicted")),
        ("bytes per step before compression measured", before.get("measured")),
        ("retried steps", summary.get("retried_steps")),
        ("skipped updates", summary.get("skipped_updates")),
        ("restarts", summary["restarts"]),
        ("wall time s", goodput["wall_seconds"]),
        *((f"of it {part.replace('_', ' ')} s", seconds or None) for part, seconds in goodput["seconds"].items()),
        ("workdir", workdir),
    ]
    return [(name, str(value)) for name, value in found if value is not None]


def print_summary(summary: Mapping[str, Any], workdir: pathlib.Path) -> None:
    """Prints the summary on standard output: a table in a terminal, else one line per row.

    Args:
        summary: As for `rows`.
        workdir: As for `rows`.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # there may be no output
    # A path or a metric's name that the terminal's encoding lacks must not fail a run that has ended well.
    text = [
        [printable(cell).encode(encoding, "backslashreplace").decode(encoding) for cell in row]
        for row in rows(summary, workdir)
    ]
    if not is_terminal():
        print(*map(": ".join, text), sep="\n", flush=True)
        return
    shown = table.Table(table.Column(style="bold"), table.Column(overflow="fold"), show_header=False)
    for row in text:
        shown.add_row(*row)
    console.Console(markup=False, emoji=False, highlight=False).print(shown)


def is_terminal() -> bool:
    """Returns whether a person reads standard output in a terminal. mpirun gives its tasks a pseudo-terminal."""
    return bool(sys.stdout and sys.stdout.isatty()) and "OMPI_COMM_WORLD_SIZE" not in os.environ


def _metric(value: Any) -> str:
    """Returns a metric as text. None in a summary is a metric that was measured, and is NaN or infinite."""
    if isinstance(value, list):
        return f"[{', '.join(map(_metric, value))}]"
    return "not finite" if value is None else f"{value:.6g}"
