"""What public bug reports found wrong is right with two workers, or rejected with a message that says what to do."""

import pytest

from tests.multiprocess.reports import table
from tests.multiprocess.reports.cases import WORKERS

pytestmark = pytest.mark.timeout(600)


@table.of(WORKERS)
def test_report(once, kind, name):
    table.check(once, WORKERS, kind, name)
