"""Arrays and records in files, trained under several strategies: as a plain loop in NumPy does, with each example once."""

import re

import pytest

from tests.multiprocess import harness

ALL = "arrays+records"
CASES = [
    ("one_device", 1, ALL),
    ("mirrored:2", 1, ALL),
    ("multi_worker_mirrored", 2, "arrays"),
    ("multi_worker_mirrored", 2, "records"),
]
FURTHER = [
    ("mirrored:3", 1, ALL),
    ("central_storage:2", 1, ALL),
    ("multi_worker_mirrored", 3, "arrays"),
    ("multi_worker_mirrored", 3, "records"),
    ("multi_worker_mirrored:2", 2, "arrays"),
    ("multi_worker_mirrored:2", 2, "records"),
]
BAD = {
    "arrays": r"{}: .*27/1.npz has changed since it was opened \(1 bytes then, ",
    "records": r"worker:\d: .*27/records/1.tfrecord is damaged: the record at byte \d+ has another checksum",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "workers", "kinds"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in FURTHER)]
)
def test_training_equals_a_plain_loop(tmp_path, strategy, workers, kinds):
    files = tmp_path / "files"
    files.mkdir()
    bad = [str(workers - 1)] if workers > 1 else []
    ranks = harness.run("arrays_program", strategy, tmp_path / "out", str(files), kinds, *bad, size=workers)
    for results in ranks:
        cases = [(case, pair) for case, pair in results.items() if isinstance(case, tuple)]
        assert len(cases) == 9 * len(kinds.split("+"))
        for case, (found, expected) in cases:
            assert harness.difference(found, expected) < 1e-5, case
        assert [weights.ravel().tolist() for weights in results["no weight"]] == [[1.0, 1.0, 1.0], [0.0]]
        if workers > 1:
            assert f"{kinds}_from in x must find the same files" in results["unlike"]
            assert "seed=1" in results["unlike"]
            assert re.match(BAD[kinds].format(f"worker:{workers - 1}"), results["bad"])
            assert results["bad"] == ranks[0]["bad"], "all workers raise the same error"
