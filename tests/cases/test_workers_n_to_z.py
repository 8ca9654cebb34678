"""Cases with two workers, of the sources from N to Z."""

import pytest

from tests.cases import table
from tests.cases.arms import WORKERS

pytestmark = pytest.mark.timeout(900)


@table.of(WORKERS, first="n")
def test_case(check, arm, one):
    check(arm, one)
