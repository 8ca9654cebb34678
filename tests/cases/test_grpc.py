"""Cases with two workers whose gradients travel by gRPC."""

import pytest

from tests.cases import table
from tests.cases.arms import GRPC

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]


@table.of(GRPC)
def test_case(check, arm, one):
    check(arm, one)
