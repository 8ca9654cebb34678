"""Cases with two replicas of one process."""

import pytest

from tests.cases import table
from tests.cases.arms import MIRRORED

pytestmark = pytest.mark.timeout(900)


@table.of(MIRRORED)
def test_case(check, arm, one):
    check(arm, one)
