"""Verifies all scripts in each mode, and writes `docs/scripts.md` of the verdicts: `python -m tests.scripts.table`."""

from __future__ import annotations

import contextlib
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from tests import scripts
from tests.helpers import fork_server
from tests.scripts import Script
from tfdist.verify import arms
from tfdist.verify.arms import DidNotRunError, Plan
from tfdist.verify.report import EQUAL_CODE, Report
from tfdist.verify.verdicts import EQUAL, NOTE, Arm

FILE = pathlib.Path(__file__).parents[2] / "docs" / "scripts.md"
UPDATES = 6
SECONDS = 300.0  # limit of an arm
MODES: dict[str, dict[str, Any]] = {
    "`mirrored`, 2 devices": {"devices": 2},
    "`multi_worker_mirrored`, 2 workers": {"workers": 2},
    "`parameter_server`, 1 worker, 1 server": {"ps": 1},
}
TRAINS, REFUSED, FAILED = "trains", "refused", "failed"
HEAD = """# Scripts that train under a Trainer

Each kind of script has `import tfdist` and a `Trainer`, and builds and compiles its model in `with trainer.scope():`. No other line was \
changed. [`tfdist verify`](verify.md) compared the first {} updates of each, and one update of each later `fit`, on one device and under \
three strategies. The scripts of all {} kinds are in `tests/scripts/`, and `tests/verify/test_scripts.py` runs them.

- **{}**: its examples, gradients, updates of weights, losses and metrics are those of one device within [rounding](verify.md#verdicts).
- **{}**: it trains, and its results differ for the reason in the note.
- **{}**: it raises the error in the note.

"""
_ERROR = re.compile(r"^(?:\[\S+\] )?tfdist\.errors\.ConfigError: (.*)$", re.MULTILINE)


def cells(name: str, folder: pathlib.Path, modes: Iterable[str] = MODES) -> dict[str, str]:
    """Returns what the table says of a script in each mode, of which it runs the arms in an empty folder."""
    command = fork_server.command("tests.scripts", name)
    found = {}
    with contextlib.chdir(folder):  # whose files the arms would copy
        one_device, failure_of_one = _run(Plan(command, steps=UPDATES), "A", folder / "arms")
        for number, mode in enumerate(modes):
            plan = Plan(command, steps=UPDATES, **MODES[mode])
            several, failure = _run(plan, "C", folder / "arms" / str(number))
            report = Report(plan, failure=failure or failure_of_one)
            if one_device and several:
                report.arms = {"A": one_device, "C": several}
            found[mode] = cell(scripts.load()[name], report)
    return found


def _run(plan: Plan, arm: str, folder: pathlib.Path) -> tuple[Arm | None, str]:
    try:
        return arms.run(plan, arm, str(folder), SECONDS), ""
    except DidNotRunError as e:
        return e.arm, str(e)


def cell(script: Script, report: Report) -> str:
    """Returns what the table says of a report on a script: a word, and a note after a colon."""
    error = _ERROR.search(report.failure)
    if error:
        return f"{REFUSED}: {error[1]}"
    statuses = {verdict.check: verdict.status for verdict in report.verdicts}
    compared = {statuses.get(check) for check in ("within rounding", "loss and metrics")}
    if report.exit_code == EQUAL_CODE and compared <= {EQUAL, NOTE}:
        return EQUAL
    if script.differs and (not report.failure or "recorded no update" in report.failure):
        return f"{TRAINS}: {script.differs}"
    return f"{FAILED}: {report.as_text()}"


def text(rows: dict[str, dict[str, str]]) -> str:
    """Returns the page; `rows` are cells by script and mode."""
    known = scripts.load()
    notes = {found.partition(": ")[2]: 0 for mode in MODES for found in (rows[name][mode] for name in rows)}
    notes.pop("", None)
    notes = {note: number for number, note in enumerate(notes, 1)}
    lines = [f"| Kind of script | Lines changed | {' | '.join(MODES)} |", "|---|---|" + "---|" * len(MODES)]
    for name, row in rows.items():
        shown = []
        for mode in MODES:
            word, _, note = row[mode].partition(": ")
            shown.append(f"{word} ({notes[note]})" if note else word)
        lines.append(f"| {known[name].kind} | {known[name].lines} | {' | '.join(shown)} |")
    counts = []
    for mode in MODES:
        count = sum(not row[mode].startswith(REFUSED) for row in rows.values())
        counts.append(f"{count} of {len(rows)} under {mode}")
    head = HEAD.format(UPDATES, len(rows), EQUAL, TRAINS, REFUSED)
    numbered = [f"{number}. {note}" for note, number in notes.items()]
    return head + f"Scripts that train: {', '.join(counts)}.\n\n" + "\n".join([*lines, "", *numbered]) + "\n"


def main() -> None:
    """Runs all, and writes the page; ends with what failed, if anything did."""
    rows = {}
    for name in scripts.load():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = cells(name, pathlib.Path(folder))
        print(name, *rows[name].values(), sep="\n  ", flush=True)
    failed = [name for name, row in rows.items() if any(found.startswith(FAILED) for found in row.values())]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    FILE.write_text(text(rows))


if __name__ == "__main__":
    main()
