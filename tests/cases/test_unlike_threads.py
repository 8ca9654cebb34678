"""Cases with two workers with other numbers of threads."""

import pytest

from tests.cases import table
from tests.cases.arms import UNLIKE_THREADS

pytestmark = pytest.mark.timeout(900)


@table.of(UNLIKE_THREADS)
def test_case(check, arm, one):
    check(arm, one)
