"""Scripts of users' kinds train under every strategy what they train as plain Keras; `docs/scripts.md` says so."""

import functools
import itertools

import pytest

from tests import scripts
from tests.helpers import tiers
from tests.scripts import table

pytestmark = pytest.mark.timeout(900)

SCRIPTS = scripts.load()


# Of each way to train one; of each kind of data, some: in a mode each, and in the other modes in `make test-all`.
# Recurrent models, several outputs and generators are in test_fit.py, too ("masked_steps", "dict_dataset", "generator").
QUICK = {
    "classifier": "multi_worker_mirrored",
    "adversarial": "mirrored",
    "own_loss_in_step": "parameter_server",
    "by_batches": "multi_worker_mirrored",
    "structured": "parameter_server",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Returns a function: mode, name, quick -> each rank's results of a script, of a run of all scripts of the same tier."""

    @functools.cache
    def ranks(mode, quick):
        if mode == "plain":  # which the scripts of both tiers are compared with
            names = QUICK if quick else SCRIPTS
        else:
            names = [each for each in SCRIPTS if (QUICK.get(each) == mode) == quick]
        return table.run(mode, tmp_path_factory.mktemp(mode), *names)

    return lambda mode, name, quick: [rank[name] for rank in ranks(mode, quick)]


@pytest.mark.parametrize(
    ("mode", "name"),
    tiers.cases(itertools.product(table.MODES, SCRIPTS), quick=[(mode, name) for name, mode in QUICK.items()]),
)
def test_a_script_does_what_the_table_says(found, mode, name):
    quick = QUICK.get(name) == mode
    (plain,) = found("plain", name, quick)
    cell = table.cell(SCRIPTS[name], plain, found(mode, name, quick))
    word, _, note = cell.partition(": ")
    assert word != table.FAILED, note
    lines = table.FILE.read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| {SCRIPTS[name].kind} |"))
    shown = row.strip("| ").split(" | ")[2 + list(table.MODES).index(mode)]
    assert shown.partition(" ")[0] == word
    if note:
        assert f"{shown.partition('(')[2][:-1]}. {note}" in lines
