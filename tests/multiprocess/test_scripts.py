"""Scripts of users' kinds train under every strategy what they train as plain Keras; `docs/scripts.md` says so."""

import pytest

from tests import scripts
from tests.scripts import table

pytestmark = pytest.mark.timeout(900)

SCRIPTS = scripts.load()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return table.run("plain", tmp_path_factory.mktemp("plain"))[0]


@pytest.fixture(scope="module", params=table.MODES)
def cells(request, plain, tmp_path_factory):
    """The mode, and what the table should say of each script."""
    ranks = table.run(request.param, tmp_path_factory.mktemp(request.param))

    def cell(name):
        return table.cell(SCRIPTS[name], plain[name], [rank[name] for rank in ranks])

    return request.param, cell


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_the_table_says(cells, name):
    mode, cell = cells
    word, _, note = cell(name).partition(": ")
    assert word != table.FAILED, note
    lines = table.FILE.read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| {SCRIPTS[name].kind} |"))
    shown = row.strip("| ").split(" | ")[2 + list(table.MODES).index(mode)]
    assert shown.partition(" ")[0] == word
    if note:
        assert f"{shown.partition('(')[2][:-1]}. {note}" in lines
