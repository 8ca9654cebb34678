"""Findings as a table in a terminal, as lines elsewhere, and as JSON. No TensorFlow here."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence

from tfdist.doctor.finding import ERROR, NOTE, OK, WARNING, Finding

_STYLES = {OK: "green", NOTE: "cyan", WARNING: "yellow", ERROR: "bold red"}


def as_json(findings: Sequence[Finding]) -> str:
    """Returns the findings as one JSON object: `ok`, which is false after an error, and `findings`."""
    return json.dumps({"ok": is_ok(findings), "findings": [each._asdict() for each in findings]}, indent=1)


def as_lines(findings: Sequence[Finding]) -> str:
    """Returns a line for each finding: `level  what: value. Do: remedy`."""
    width = max(map(len, _STYLES))
    lines = [
        f"{each.level:{width}}  {each.what}: {each.value}" + f" -> {each.remedy}" * bool(each.remedy)
        for each in findings
    ]
    return "\n".join([*lines, _verdict(findings)])


def as_table(findings: Sequence[Finding]) -> str:
    """Returns the findings as a table for the terminal at standard output."""
    from rich import console, table, text

    shown = table.Table("", "what", table.Column("found", overflow="fold"), table.Column("do", overflow="fold"))
    for each in findings:
        level = text.Text(each.level, style=_STYLES[each.level])
        shown.add_row(level, *(text.Text(part) for part in each[1:]))
    screen = _Screen()
    console.Console(file=screen, markup=False, emoji=False, highlight=False).print(shown)
    return screen.getvalue() + _verdict(findings)


def is_ok(findings: Sequence[Finding]) -> bool:
    """Returns whether nothing would stop a run."""
    return all(each.level != ERROR for each in findings)


class _Screen(io.StringIO):
    """What is to be written to a terminal with its encoding, in whose width and colours it is."""

    encoding = property(lambda self: sys.stdout.encoding)

    def isatty(self) -> bool:
        return True


def _verdict(findings: Sequence[Finding]) -> str:
    counts = {level: sum(each.level == level for each in findings) for level in (ERROR, WARNING, NOTE)}
    counted = ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items())
    return f"{'OK' if is_ok(findings) else 'NOT OK'}: {counted}"
