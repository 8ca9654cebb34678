"""Cases with two workers of two devices each."""

import pytest

from tests.cases import table
from tests.cases.arms import TWO_EACH

# tests/multiprocess/test_any_size.py trains two workers of two devices each in the first tier.
pytestmark = [pytest.mark.timeout(900), pytest.mark.full]


@table.of(TWO_EACH)
def test_case(check, arm, one):
    check(arm, one)
