"""Cases with four replicas of one process."""

import pytest

from tests.cases import table
from tests.cases.arms import FOUR_DEVICES

pytestmark = pytest.mark.timeout(900)


@table.of(FOUR_DEVICES)
def test_case(check, arm, one):
    check(arm, one)
