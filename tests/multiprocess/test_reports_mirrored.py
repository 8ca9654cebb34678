"""What public bug reports found wrong is right with two replicas of one process, or rejected with a message that says what to do."""

import pytest

from tests.multiprocess.reports import table
from tests.multiprocess.reports.cases import MIRRORED

pytestmark = pytest.mark.timeout(600)


@table.of(MIRRORED)
def test_report(once, kind, name):
    table.check(once, MIRRORED, kind, name)
