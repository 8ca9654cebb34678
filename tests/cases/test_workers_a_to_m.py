"""Cases with two workers, of the sources from A to M."""

import pytest

from tests.cases import table
from tests.cases.arms import WORKERS

pytestmark = pytest.mark.timeout(900)


@table.of(WORKERS, last="m")
def test_case(check, arm, one):
    check(arm, one)
