"""Cases with two workers of two devices each."""

import pytest

from tests.cases import table
from tests.cases.arms import TWO_EACH

pytestmark = pytest.mark.timeout(900)


@table.of(TWO_EACH)
def test_case(check, arm, one):
    check(arm, one)
