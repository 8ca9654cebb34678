"""The share of a machine's cores that each of several namespaces has."""

from __future__ import annotations

import collections

import pytest

from tools.netlab.launch import cores_for


@pytest.mark.parametrize("cores", [[0], [2, 5], [0, 1, 2], list(range(8))])
@pytest.mark.parametrize("count", range(1, 10))
def test_all_have_as_much(cores, count):
    shares = [cores_for(number, count, cores) for number in range(count)]
    users = collections.Counter(core for each in shares for core in each)
    assert set(users) <= set(cores)
    if all(len(each) == len(cores) for each in shares):
        return  # the system shares them out
    assert len({(len(each), *sorted({users[core] for core in each})) for each in shares}) == 1
    assert max(users.values()) == 1 or set(users) == set(cores), "no core is idle while another one is shared"


def test_as_many_as_cores_have_one_each():
    assert [cores_for(number, 2, [2, 5]) for number in range(2)] == [[2], [5]]
    assert [cores_for(number, 2, [0, 1, 2, 3]) for number in range(2)] == [[0, 1], [2, 3]]
    assert [cores_for(number, 4, [0, 1]) for number in range(4)] == [[0], [1], [0], [1]]
