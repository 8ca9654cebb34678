"""Cases with one device."""

import pytest

from tests.cases import table
from tests.cases.arms import ONE_DEVICE

pytestmark = pytest.mark.timeout(900)


@table.of(ONE_DEVICE)
def test_case(check, arm, one):
    check(arm, one)
