"""Cases with workers whose CPUs stand in for GPUs: all but NCCL's kernels."""

import pytest

from tests.cases import table
from tests.cases.arms import ON_GPUS, PIECES_ON_GPUS, TWO_GPUS_EACH

pytestmark = pytest.mark.timeout(900)


@table.of(ON_GPUS)
def test_one_gpu_for_each_worker(check, arm, one):
    check(arm, one)


@table.of(TWO_GPUS_EACH)
def test_two_gpus_for_each_worker(check, arm, one):
    check(arm, one)


@table.of(PIECES_ON_GPUS)
def test_pieces_on_gpus(check, arm, one):
    check(arm, one)
