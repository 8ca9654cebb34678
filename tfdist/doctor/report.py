"""The findings of `tfdist doctor`: it runs checks beside each other, and shows what they find as a table, lines or JSON.

No TensorFlow here.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tfdist.errors import describe_error, truncate
from tfdist.errors import printable as escaped

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
_STYLES = {OK: "green", NOTE: "cyan", WARNING: "yellow", ERROR: "bold red"}
_PASSWORD = re.compile(r"[^\s'\"/=,]+:[^\s'\"/=,]*@")


class Finding(NamedTuple):
    """One row of the table.

    Attributes:
        level: `"ok"`; `"note"`, worth knowing; `"warning"`, a run may suffer; `"error"`, a run would fail.
        what: What was looked at.
        value: What was found.
        remedy: What to do; empty for nothing.
    """

    level: str
    what: str
    value: str
    remedy: str = ""


Check = Callable[[Mapping[str, str]], Iterable[Finding]]


def examine(checks: Mapping[str, tuple[Check, float]], environ: Mapping[str, str]) -> list[Finding]:
    """Returns the findings of all checks, in their order.

    The checks run beside each other, each for a limited time: a file system or a name server that hangs holds up only its own
    check.

    Args:
        checks: By subject: the check, and the seconds that it may take.
        environ: The environment.
    """
    found: dict[str, list[Finding]] = {name: [] for name in checks}

    def look(name: str, check: Check) -> None:
        try:
            for finding in check(environ):
                found[name].append(finding)
        except Exception as e:  # the others are worth more than this one
            problem = f"cannot be looked at: {printable(describe_error(e))}"
            found[name].append(Finding(WARNING, name, problem, "see the other findings"))

    began = time.monotonic()
    threads = {
        name: threading.Thread(target=look, args=(name, check), daemon=True, name=f"tfdist-doctor-{name}")
        for name, (check, _) in checks.items()
    }
    for thread in threads.values():
        thread.start()
    findings: list[Finding] = []
    for name, (_, limit) in checks.items():
        threads[name].join(max(0.0, began + limit - time.monotonic()))
        findings += list(found[name])
        if threads[name].is_alive():
            remedy = "look whether a disk or name server hangs"
            findings.append(Finding(WARNING, name, f"no answer within {limit:.0f} s", remedy))
    return findings


def as_table(findings: Sequence[Finding]) -> str:
    """Returns the findings as a table for the terminal at standard output."""
    from rich import console, table, text

    shown = table.Table("", "what", table.Column("found", overflow="fold"), table.Column("do", overflow="fold"))
    for level, *parts in findings:
        shown.add_row(text.Text(level, style=_STYLES[level]), *map(text.Text, parts))
    terminal = console.Console(markup=False, emoji=False, highlight=False)
    with terminal.capture() as captured:
        terminal.print(shown)
    return captured.get() + _verdict(findings)


def as_lines(findings: Sequence[Finding]) -> str:
    """Returns a line for each finding: `level  what: value -> remedy`."""
    width = max(map(len, _STYLES))
    lines = [f"{level:{width}}  {what}: {value}" + f" -> {do}" * bool(do) for level, what, value, do in findings]
    return "\n".join([*lines, _verdict(findings)])


def as_json(findings: Sequence[Finding]) -> str:
    """Returns the findings as one JSON object: `ok`, which is false after an error, and `findings`."""
    return json.dumps({"ok": is_ok(findings), "findings": [each._asdict() for each in findings]}, indent=1)


def _verdict(findings: Sequence[Finding]) -> str:
    counts = {level: sum(each.level == level for each in findings) for level in (ERROR, WARNING, NOTE)}
    counted = ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items())
    return f"{'OK' if is_ok(findings) else 'NOT OK'}: {counted}"


def is_ok(findings: Sequence[Finding]) -> bool:
    """Returns whether nothing would stop a run."""
    return all(each.level != ERROR for each in findings)


def shorten(value: str) -> str:
    """Returns a variable's value so that it can be printed: cut, and with control characters escaped."""
    return printable(truncate(value)) or "(empty)"


def printable(text: str) -> str:
    """Returns a text without `user:password@`, and with control characters escaped: a variable must not steer a terminal."""
    return escaped(_PASSWORD.sub("", text))


def format_bytes(count: float) -> str:
    """Returns a number of bytes for a reader, such as `1.5 GiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
