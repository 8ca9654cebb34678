"""Cases with parameter servers."""

import pytest

from tests.cases import table
from tests.cases.arms import SERVERS

pytestmark = pytest.mark.timeout(900)


@table.of(SERVERS)
def test_case(check, arm, one):
    check(arm, one)
