"""What public bug reports found wrong is right with parameter servers, or rejected with a message that says what to do."""

import pytest

from tests.multiprocess.reports import table
from tests.multiprocess.reports.cases import SERVERS

pytestmark = pytest.mark.timeout(600)


@table.of(SERVERS)
def test_report(once, kind, name):
    table.check(once, SERVERS, kind, name)
