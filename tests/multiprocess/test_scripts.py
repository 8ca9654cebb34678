"""Scripts of users' kinds train under every strategy what they train as plain Keras; `docs/scripts.md` says so."""

import functools

import pytest

from tests import scripts
from tests.helpers import tiers
from tests.scripts import table

pytestmark = pytest.mark.timeout(900)

SCRIPTS = scripts.load()


# Of each way to train one; of each kind of data, some.
QUICK = [
    "classifier",
    "adversarial",
    "own_loss_in_step",
    "by_batches",
    "recurrent",
    "structured",
    "several_outputs",
    "generator",
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Returns a function: mode, name -> each rank's results of a script, of a run of all scripts of the same tier."""

    @functools.cache
    def ranks(mode, quick):
        names = [each for each in SCRIPTS if (each in QUICK) == quick]
        return table.run(mode, tmp_path_factory.mktemp(mode), *names)

    return lambda mode, name: [rank[name] for rank in ranks(mode, name in QUICK)]


@pytest.mark.parametrize("name", tiers.cases(SCRIPTS, quick=QUICK))
@pytest.mark.parametrize("mode", table.MODES)
def test_a_script_does_what_the_table_says(found, mode, name):
    (plain,) = found("plain", name)
    cell = table.cell(SCRIPTS[name], plain, found(mode, name))
    word, _, note = cell.partition(": ")
    assert word != table.FAILED, note
    lines = table.FILE.read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| {SCRIPTS[name].kind} |"))
    shown = row.strip("| ").split(" | ")[2 + list(table.MODES).index(mode)]
    assert shown.partition(" ")[0] == word
    if note:
        assert f"{shown.partition('(')[2][:-1]}. {note}" in lines
