"""A worker that ends alone ends the others, soon and with a sentence, where no launcher does so."""

import sys
import time

import pytest

from tests.multiprocess.roles import Roles


@pytest.mark.parametrize(("lost", "how"), [(1, "error"), (1, "kill"), (0, "kill")])
def test_the_others_end_and_name_it(tmp_path, lost, how):
    command = [sys.executable, "-m", "tests.multiprocess.lost_worker_program", str(lost), how]
    with Roles(command, tmp_path / "roles", workers=2, ps=0) as roles:
        gone, left = (f"worker:{rank}" for rank in (lost, 1 - lost))
        roles.wait(gone, 120)
        ended = time.monotonic()
        assert "it happens" in roles.log(gone), roles.log(gone)
        assert roles.wait(left, 40) == 1  # without looking it would wait for two minutes
        assert time.monotonic() - ended < 30
        sentence = (
            f"tfdist.errors.ClusterError: {gone} at {roles.cluster.address(roles.cluster.training_tasks()[lost])}"
        )
        assert sum(sentence in line for line in roles.log(left).splitlines()) == 1, roles.log(left)
