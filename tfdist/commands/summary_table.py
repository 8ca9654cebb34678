"""The printed summary of a run: a table in a terminal, lines `name: value` in a pipe or a file. No TensorFlow here."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich import console, table

from tfdist.errors import encodable, printable
from tfdist.runtime.folders import storage
from tfdist.runtime.log import is_terminal

_CHARTS = "http://localhost:6006/#custom_scalars"  # by TensorBoard's own port
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def rows(summary: Mapping[str, Any], workdir: pathlib.Path | str) -> list[tuple[str, str]]:
    """Returns the names and values of the table, without values that were not measured.

    Args:
        summary: The summary, from `RunSummary.to_dict`, or as read from `summary.json`.
        workdir: The folder of the run's files, or its URL.

    Examples:
        >>> for name, value in rows(json.loads((workdir / "summary.json").read_text()), workdir):
        ...     print(f"{name}: {value}")
    """
    replicas = "replicas"
    batch = "global batch"
    if "retried_steps" in summary:  # with parameter servers: each step runs on one worker
        replicas = "workers"
        batch = "batch per worker"
    compression = summary["compression"]["name"]
    if compression == "none":
        compression = None
    sent = summary["wire_bytes_per_step"]
    transport = summary.get("transport")
    values = [
        ("task", summary["task"]),
        ("strategy", summary["strategy"]),
        (replicas, summary["num_replicas"]),
        ("workers over time", _sizes(summary.get("sizes", []))),
        (batch, summary["batch_size"]),
        ("ended early", summary.get("ended_early")),
        *((name, _metric(value)) for name, value in summary["metrics"].items()),
        ("speed", _speed(summary)),
        ("compression", compression),
        ("network bytes per step", _network(sent, transport)),
        ("network bytes per step before compression", _network(sent.get("before_compression", {}), transport)),
        ("retried steps", summary.get("retried_steps")),
        ("staleness", _staleness(summary.get("staleness"))),
        ("skipped updates", summary.get("skipped_updates")),
        ("restarts", summary["restarts"]),
        ("wall time", _wall_time(summary["goodput"])),
        ("workdir", workdir),
    ]
    return [(name, str(value)) for name, value in values if value is not None]


def print_summary(summary: Mapping[str, Any], workdir: pathlib.Path | str) -> None:
    """Prints the summary on standard output, as a table in a terminal, else one line per row; then the command that shows the run's curves.

    Args:
        summary: As for `rows`.
        workdir: As for `rows`.
    """
    # A path or a metric's name that standard output cannot encode must not fail a finished run.
    text = [[encodable(printable(cell)) for cell in row] for row in rows(summary, workdir)]
    if is_terminal():
        shown = table.Table(table.Column(style="bold"), table.Column(overflow="fold"), show_header=False)
        for row in text:
            shown.add_row(*row)
        console.Console(markup=False, emoji=False, highlight=False).print(shown)
    else:
        print(*map(": ".join, text), sep="\n")
    # Outside of the table, which would fold a long path, so that the line can be copied.
    folder = os.path.join(workdir, "tensorboard")
    command = f"tensorboard --logdir {_shell_word(folder)}"
    if storage.is_url(folder):
        command += "  # in an environment without TensorFlow"
    print(encodable(command))
    print(f"then open {_CHARTS}", flush=True)


def _metric(value: Any) -> str:
    """Returns a metric as text. None in a summary stands for NaN or infinity."""
    if isinstance(value, list):
        return f"[{', '.join(map(_metric, value))}]"
    if value is None:
        return "not finite"
    return f"{value:.6g}"


def _sizes(sizes: Sequence[Mapping[str, int]]) -> str | None:
    """Returns the numbers of workers of a run that has changed it, else None."""
    if len(sizes) < 2:
        return None
    return ", ".join(f"{size['workers']} from step {size['step']}" for size in sizes)


def _staleness(staleness: Mapping[str, float] | None) -> str | None:
    if staleness is None:
        return None
    return f"mean {staleness['mean']}, max {staleness['max']}"


def _speed(summary: Mapping[str, Any]) -> str | None:
    """Returns the mean step time and the examples per second, two forms of the same measurement."""
    mean = summary["step_ms"].get("mean")
    examples = summary["examples_per_second"]
    if mean is None or examples is None:
        return None
    return f"{mean:,.1f} ms a step, {examples:,.0f} examples/s, validation not counted"


def _network(sent: Mapping[str, Any], transport: str | None) -> str | None:
    """Returns the measured network bytes, and the predicted bytes of the gradients, over the network or through shared memory."""
    measured = sent.get("measured")
    gradients = sent.get("predicted")
    if not measured and not gradients:
        return None
    network = f"{measured:,}" if measured else "not measured"
    notes = []
    if transport == "shared_memory":
        notes.append("gradients travel through shared memory")
    elif gradients:
        notes.append("prediction for the gradients alone")
    if gradients:
        notes.append(f"{gradients:,} bytes")
    if not notes:
        return network
    return f"{network} ({': '.join(notes)})"


def _wall_time(goodput: Mapping[str, Any]) -> str:
    parts = [f"{part.replace('_', ' ')} {seconds} s" for part, seconds in goodput["seconds"].items() if seconds]
    return f"{goodput['wall_seconds']} s: {', '.join(parts)}"


def _shell_word(text: str) -> str:
    """Returns a text quoted for a shell. Control characters, which would act on the terminal, become escapes that bash and zsh read."""
    if not _CONTROL.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_CONTROL.sub(lambda match: repr(match[0])[1:-1], escaped)}'"
