"""What public bug reports found wrong is right with two workers of two devices each, or rejected with a message that says what to do."""

import pytest

from tests.multiprocess.reports import table
from tests.multiprocess.reports.cases import TWO_EACH

pytestmark = pytest.mark.timeout(600)


@table.of(TWO_EACH)
def test_report(once, kind, name):
    table.check(once, TWO_EACH, kind, name)
