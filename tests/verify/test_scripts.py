"""Scripts of users' kinds train under every strategy what they train on one device; `docs/scripts.md` says so."""

import pytest

from tests import scripts
from tests.helpers import tiers
from tests.scripts import table

pytestmark = pytest.mark.timeout(900)

SCRIPTS = scripts.load()
FIRST, _, LAST = table.MODES
QUICK = {FIRST: "adversarial", LAST: "own_loss_in_step"}  # test_runs.py verifies with workers
ROWS = [(name, tuple(table.MODES)) for name in SCRIPTS]


@pytest.mark.parametrize(
    ("name", "modes"), tiers.cases([*((name, (mode,)) for mode, name in QUICK.items()), *ROWS], quick=len(QUICK))
)
def test_a_script_does_what_the_table_says(name, modes, tmp_path):
    found = table.cells(name, tmp_path, modes)
    lines = table.FILE.read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| {SCRIPTS[name].kind} |"))
    shown = dict(zip(table.MODES, row.strip("| ").split(" | ")[2:], strict=True))
    for mode, cell in found.items():
        word, _, note = cell.partition(": ")
        assert word != table.FAILED, note
        assert shown[mode].partition(" ")[0] == word
        if note:
            assert f"{shown[mode].partition('(')[2][:-1]}. {note}" in lines
