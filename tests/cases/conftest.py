import pytest

from tests.cases import case, table


@pytest.fixture
def check(once, request):
    """Returns a function that checks a case of an arm."""
    return lambda arm, one: case.check(one, table.results(once, request.node, arm, one))
