"""Cases with two workers that hold kernels in pieces."""

import pytest

from tests.cases import table
from tests.cases.arms import PIECES

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]


@table.of(PIECES)
def test_case(check, arm, one):
    check(arm, one)
