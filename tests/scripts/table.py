"""Runs all scripts in each mode, and writes `docs/scripts.md` of what came out: `python -m tests.scripts.table`."""

from __future__ import annotations

import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

from tests.helpers import fork_server
from tests.multiprocess import harness
from tests.multiprocess.roles import Roles

FILE = pathlib.Path(__file__).parents[2] / "docs" / "scripts.md"
MODES = {
    "mirrored": "`mirrored`, 2 devices",
    "multi_worker_mirrored": "`multi_worker_mirrored`, 2 workers",
    "parameter_server": "`parameter_server`, 1 worker, 1 server",
}
EQUAL, TRAINS, REFUSED, FAILED = "equal", "trains", "refused", "failed"
HEAD = """# Scripts that train under a Trainer

Each kind of script was run twice: as plain Keras, and with `import tfdist`, a `Trainer`, and its model built and compiled in \
`with trainer.scope():`. No other line was changed. The scripts of all {} kinds are in `tests/scripts/`, and \
`tests/multiprocess/test_scripts.py` runs them.

- **{}**: its losses, metrics, weights and predictions are those of plain Keras on one device within 0.00001.
- **{}**: it trains, and its results differ for the reason in the note.
- **{}**: it raises the error in the note.

"""


def run(mode: str, folder: pathlib.Path, *names: str) -> list[dict[str, Any]]:
    """Returns what each rank's scripts return.

    Args:
        mode: "plain" or one of `MODES`.
        folder: An empty folder.
        *names: Of the scripts to run; none means all.
    """
    if mode != "parameter_server":
        return harness.run("scripts_program", mode, folder, *names)
    command = fork_server.command("tests.multiprocess.scripts_program", mode, str(folder / "out"), *names)
    with Roles(command, folder / "roles", workers=1, ps=1) as roles:
        assert roles.wait("chief:0", harness.TIMEOUT) == 0, roles.log("chief:0")
        assert [roles.wait(task, 20) for task in roles.processes] == [0] * len(roles.processes)
    return [harness.load(folder / "out", 0)]


def cell(script: Any, plain: Any, found: list[Any]) -> str:
    """Returns what the table says of a script's run, or `FAILED` and why.

    Args:
        script: The script.
        plain: What it returned as plain Keras.
        found: What it returned on each rank.
    """
    errors = [each for each in (plain, *found) if isinstance(each, str)]
    if errors:
        said = {each.removeprefix("ConfigError: ") for each in found}
        refused = len(said) == 1 and all(each.startswith("ConfigError: ") for each in found)
        return f"{REFUSED if refused else FAILED}: {errors[0].removeprefix('ConfigError: ')}"
    difference = max(harness.difference(each, plain) for each in found)
    if script.differs and np.isfinite(difference):
        return f"{TRAINS}: {script.differs}"
    return EQUAL if difference < 1e-5 else f"{FAILED}: differs by {difference}"


def text(cells: dict[str, dict[str, str]], scripts: dict[str, Any]) -> str:
    """Returns the page.

    Args:
        cells: By mode and script.
        scripts: By name.
    """
    notes = list(
        dict.fromkeys(each.partition(": ")[2] for of in cells.values() for each in of.values() if ": " in each)
    )
    lines = [f"| Kind of script | Lines changed | {' | '.join(MODES.values())} |", "|---|---|" + "---|" * len(MODES)]
    for name, script in scripts.items():
        shown = []
        for mode in MODES:
            word, _, note = cells[mode][name].partition(": ")
            shown.append(f"{word} ({notes.index(note) + 1})" if note else word)
        lines.append(f"| {script.kind} | {script.lines} | {' | '.join(shown)} |")
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    count = {mode: sum(REFUSED not in each for each in of.values()) for mode, of in cells.items()}
    total = ", ".join(f"{number} of {len(scripts)} under {MODES[mode]}" for mode, number in count.items())
    head = HEAD.format(len(scripts), EQUAL, TRAINS, REFUSED)
    return head + f"Scripts that train: {total}.\n\n" + "\n".join([*lines, "", *numbered]) + "\n"


def main() -> None:
    """Runs all, and writes the page; ends with what failed, if anything did."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="scripts"))
    results = {mode: run(mode, folder / mode) for mode in ("plain", *MODES)}
    from tests import scripts

    known, plain = scripts.load(), results.pop("plain")[0]
    cells = {
        mode: {name: cell(script, plain[name], [each[name] for each in ranks]) for name, script in known.items()}
        for mode, ranks in results.items()
    }
    failed = [f"{name}, {mode}: {each}" for mode, of in cells.items() for name, each in of.items() if FAILED in each]
    if failed:
        sys.exit("\n".join(failed))
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text(cells, known))


if __name__ == "__main__":
    main()
