"""What public bug reports found wrong is right under every strategy, or rejected with a message that says what to do."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.reports import cases

pytestmark = pytest.mark.timeout(600)


def table():
    return [
        pytest.param(strategy, kind, name, marks=pytest.mark.full if each.full else ())
        for kind in cases.KINDS
        for strategy in (cases.MIRRORED, cases.WORKERS, cases.SERVERS)
        for name, each in cases.of_kind(kind).items()
        if strategy in each.strategies
    ]


@pytest.fixture(scope="module")
def found(once):
    """Returns a function: what each rank found in a case. The cases of a kind, strategy and tier share a run."""

    def find(strategy, kind, name):
        known = cases.of_kind(kind)
        together = [
            each.name for each in known.values() if strategy in each.strategies and each.full == known[name].full
        ]

        def run(folder):
            if strategy == cases.SERVERS:
                harness.run_roles("reports_program", folder, 1, kind, *together)
            else:
                harness.run("reports_program", strategy, folder / "out", kind, *together)

        out = once.folder(f"reports {strategy} {kind} {together}", run)
        return [each[name] for each in harness.load_all(out / "out")]

    return find


@pytest.mark.parametrize(("strategy", "kind", "name"), table())
def test_report(found, strategy, kind, name):
    cases.check(cases.of_kind(kind)[name], found(strategy, kind, name))
