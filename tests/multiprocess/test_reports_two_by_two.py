"""What public bug reports found wrong is right with two workers of two devices each."""

import pytest

from tests.multiprocess.reports import table
from tests.multiprocess.reports.cases import TWO_BY_TWO

pytestmark = pytest.mark.timeout(600)


@table.of(TWO_BY_TWO)
def test_report(once, kind, name):
    table.check(once, TWO_BY_TWO, kind, name)
