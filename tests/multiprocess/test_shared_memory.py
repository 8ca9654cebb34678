"""Workers whose gradients travel through shared memory train what they train by TensorFlow's collectives, and what one process does."""

import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import pytest

from tests.helpers import fork_server
from tests.multiprocess import harness, test_lost_workers
from tests.multiprocess.test_backup import check_equal, run_uninterrupted
from tests.multiprocess.test_backup import run as run_backup_program
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options

pytestmark = pytest.mark.timeout(900)

CASES = [
    "short_last_batch",
    "executions_of_4",
    "compiled",
    "rows_of_words",
    "loss_of_one_number",
    "metrics_with_state",
    "accumulation_with_everything",
    "accumulation_of_embeddings",
    "masked_steps",
    "eager",
    "loss_scale_and_accumulation",
    "mixed_bfloat16",
    "mixed_float16",
]


@pytest.fixture
def nothing_is_left(tmp_path, monkeypatch):
    """Checks that the test leaves no folder of the launcher's or a task's, nor a file where programs share memory."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert [*folder.glob("tfdist*"), *pathlib.Path("/dev/shm").glob("*tfdist*")] == []


@pytest.mark.full  # test_any_size.py and test_tcp.py have the bits
def test_two_workers_train_what_they_do_by_grpc_to_the_bit(tmp_path):
    found = harness.run("transport_program", "multi_worker_mirrored", tmp_path, transport="shared_memory")
    harness.check_trained_alike(found, "shared_memory")


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
def test_workers_train_what_one_process_does(stock, tmp_path, size):
    found = harness.run("fit_program", "multi_worker_mirrored", tmp_path, *CASES, size=size, transport="shared_memory")
    check_fits(found, stock(*CASES))


def check_fits(found, stock, cases=CASES):
    """Compares what ranks of `fit_program` have trained in some cases with what one process has."""
    for results in found:
        for case in cases:
            far = 2e-2 if case.startswith("mixed") else 1e-5
            assert harness.difference(results[case]["weights"], stock[case]["weights"]) < far, case
            if not case.startswith("mixed"):
                assert harness.difference(results[case]["history"], stock[case]["history"]) < 1e-5, case
                assert harness.difference(results[case]["slots"], stock[case]["slots"]) < 1e-4, case


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
def test_compressors_exchange_what_they_do_by_grpc(runs, size):
    how = ("multi_worker_mirrored", "compression_program", "exchanges", "rows", "kinds")
    mine, grpc = (runs(*how, size=size, transport=name)[0] for name in ("shared_memory", "grpc"))
    harness.check_exchanges(mine, grpc)


@pytest.mark.full
@pytest.mark.parametrize("case", ["callback", "fit"])
def test_workers_that_do_different_things_say_so(tmp_path, case):
    sentence = {
        "callback": "Workers did different things at once: worker:0 was in fit",
        "fit": "A dataset has fewer batches on some workers than on others",
    }[case]
    for results in harness.run(
        "mismatched_calls_program", "multi_worker_mirrored", tmp_path, case, transport="shared_memory"
    ):
        assert results["said"].startswith(sentence), results["said"]


def launch(tmp_path, *args):
    """Runs `lost_worker_program` under the launcher; returns the exit code and what was shown."""
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), harness.TRANSPORT: "shared_memory"}
    command = fork_server.command("tests.multiprocess.lost_worker_program", *args)
    shown = io.BytesIO()
    code = Launcher(
        Options(["timeout", "300", *command], local_cluster(2), tmp_path / "logs", environ), output=shown
    ).run()
    return code, shown.getvalue().decode()


@pytest.mark.full
@pytest.mark.parametrize(("lost", "how"), [(1, "kill"), (0, "kill"), (1, "exit")])
def test_a_worker_that_ends_amid_training_ends_all(tmp_path, lost, how, nothing_is_left):
    code, text = launch(tmp_path, str(lost), how)
    assert code != 0
    assert text.count(said := f"[worker:{lost}] it happens") == 1
    assert f"worker:{lost}" in text.replace(said, ""), text


@pytest.mark.full
@pytest.mark.parametrize(("lost", "how"), [(1, "error"), (1, "kill"), (0, "kill"), (1, "exit")])
def test_the_others_end_and_name_it_where_no_launcher_does_so(tmp_path, monkeypatch, lost, how):
    monkeypatch.setenv(harness.TRANSPORT, "shared_memory")
    test_lost_workers.test_the_others_end_and_name_it(tmp_path, lost, how)


@pytest.mark.slow
def test_a_worker_that_stays_stopped_is_given_up_by_name(tmp_path, nothing_is_left):
    began = time.monotonic()
    code, text = launch(tmp_path, "1", "stop")
    assert code == 1
    assert re.search(r"^tfdist: worker:0 waits for worker:1 at .*; ending all tasks", text, re.MULTILINE), text
    assert 50 < time.monotonic() - began < 240


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_restarted_and_the_bits_are_the_same(tmp_path, monkeypatch, once, rank, nothing_is_left):
    expected = run_uninterrupted(once, "multi_worker_mirrored")
    monkeypatch.setenv(harness.TRANSPORT, "shared_memory")
    kills = [[rank, "step", 12]]
    code, text, results = run_backup_program("multi_worker_mirrored", tmp_path / "killed", max_restarts=1, kills=kills)
    assert code == 0, text
    # The other one ends of it, and may do so before the launcher has seen how the first one ended.
    assert re.search(rf"worker:{rank} lost|worker:{1 - rank} lost .*worker:{rank} at", text), text
    assert text.count("gradients travel by shared_memory") == 2, text
    check_equal(results, expected)


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("alone", "rank 1 has another host or network namespace than rank 0"),
        pytest.param("different", "strategy.transport must be the same for all workers", marks=pytest.mark.full),
    ],
)
def test_who_cannot_share_memory_is_told_so_on_all_workers(tmp_path, where, sentence):
    """Where each worker has another host, or wants another transport."""
    program = (
        "import os, json, pathlib, tfdist\n"
        "from tfdist.collectives import shared_memory_rendezvous as rendezvous\n"
        "index = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        f"alone = {where == 'alone'}\n"
        "rendezvous.host_key = lambda: str(index * alone)\n"
        "tfdist.Trainer('multi_worker_mirrored', transport='shared_memory' if alone or index else 'grpc')\n"
    )
    command = [sys.executable, "-m", "tfdist.launch", "--workers=2", f"--log_dir={tmp_path}", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(harness.ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    for rank in range(2):
        said = (tmp_path / f"worker-{rank}.log").read_text()
        assert f"ConfigError: {sentence}" in said or f"is not possible: {sentence}. Use" in said, said + done.stderr
