"""Audits on real workers: they change no bit, and a bit that one worker's layer flips is found and the worker named."""

import re

import pytest

from tests.multiprocess import harness


@pytest.mark.parametrize(
    ("fault", "workers", "cause"),
    [
        ("once", 2, r"it computed others when it repeated the step, and worker:0 agrees with these"),
        ("always", 3, r"worker:0 and worker:2 agree against it"),
    ],
)
def test_a_flipped_bit_is_found_and_its_worker_named(tmp_path, fault, workers, cause):
    ranks = harness.run("audit_program", "multi_worker_mirrored", tmp_path, fault, size=workers)
    for found in ranks:
        assert re.search(
            rf"^worker:1 on host \S+ computed wrong gradients at step \d: {cause}; remove the host", found["error"]
        )
        assert found["error"] == ranks[0]["error"]
    if fault == "once":
        for found in ranks:
            assert found["audits"] == 4  # of two epochs of four steps, in executions of two
            assert harness.difference(found["with"], found["without"]) == 0.0
