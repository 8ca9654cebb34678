"""Cases with three workers."""

import pytest

from tests.cases import table
from tests.cases.arms import THREE_WORKERS

pytestmark = pytest.mark.timeout(900)


@table.of(THREE_WORKERS)
def test_case(check, arm, one):
    check(arm, one)
