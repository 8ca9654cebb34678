"""Arrays in files, trained under several strategies: as a plain loop in NumPy does, with each example once."""

import pytest

from tests.multiprocess import harness

CASES = [("one_device", 1), ("mirrored:2", 1), ("multi_worker_mirrored", 2)]
FURTHER = [("mirrored:3", 1), ("central_storage:2", 1), ("multi_worker_mirrored", 3), ("multi_worker_mirrored:2", 2)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "workers"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in FURTHER)]
)
def test_training_equals_a_plain_loop(tmp_path, strategy, workers):
    files = tmp_path / "files"
    files.mkdir()
    bad = [str(workers - 1)] if workers > 1 else []
    ranks = harness.run("arrays_program", strategy, tmp_path / "out", str(files), *bad, size=workers)
    for results in ranks:
        for case, (found, expected) in [(case, pair) for case, pair in results.items() if isinstance(case, tuple)]:
            assert harness.difference(found, expected) < 1e-5, case
        assert [weights.ravel().tolist() for weights in results["no weight"]] == [[1.0, 1.0, 1.0], [0.0]]
        if workers > 1:
            assert "arrays_from in x must find the same files" in results["unlike"]
            assert "seed=1" in results["unlike"]
            assert results["bad"].startswith(f"worker:{workers - 1}: ")
            assert "27/1.npz has changed since it was opened (1 bytes then, " in results["bad"]
