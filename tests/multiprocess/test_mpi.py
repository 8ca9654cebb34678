"""Workers whose gradients travel by MPI train what they train by TensorFlow's collectives, and what one process does."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from tests.multiprocess import harness

pytest.importorskip("mpi4py")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed: make system-deps"),
]

# The last batch is a tail; rows of embeddings; a loop in the graph; compiled; a loss of the whole batch, gathered in the forward pass.
CASES = ["short_last_batch", "executions_of_4", "compiled", "rows_of_words", "loss_of_one_number"]
FULL_CASES = [*CASES, "metrics_with_state", "accumulation_with_everything", "eager", "mixed_bfloat16", "loss_scale"]
PARTS = ["exchanges", "rows", "kinds"]  # of every compressor


@pytest.mark.full  # tests/end_to_end/test_schedulers.py trains two ranks, too
def test_two_ranks_train_what_one_process_does(stock, tmp_path):
    expected = stock(*FULL_CASES)
    for results in harness.mpirun("fit_program", tmp_path, *FULL_CASES):
        for case in FULL_CASES:
            far = 2e-2 if case.startswith("mixed") else 2e-5
            for mine, other in zip(results[case]["weights"], expected[case]["weights"], strict=True):
                np.testing.assert_allclose(mine, other, atol=far, rtol=0, err_msg=case)


@pytest.mark.full
@pytest.mark.parametrize("hosts", ["a,b,a,b", pytest.param("a,a,b", marks=pytest.mark.slow)])
def test_ranks_of_several_hosts_train_what_one_process_does(stock, tmp_path, monkeypatch, hosts):
    expected = stock(*CASES)
    monkeypatch.setenv(harness.HOSTS, hosts)
    every = harness.mpirun("fit_program", tmp_path, *CASES, size=len(hosts.split(",")))
    for results in every:
        for case in CASES:
            assert harness.difference(results[case]["weights"], expected[case]["weights"]) < 2e-5, case
            assert harness.difference(results[case]["weights"], every[0][case]["weights"]) == 0, case


@pytest.mark.slow
def test_two_ranks_train_what_they_do_by_grpc_to_the_bit(tmp_path):
    mpi, grpc = (
        harness.mpirun("fit_program", tmp_path / transport, *CASES, transport=transport)
        for transport in ("mpi", "grpc")
    )
    for mine, other in zip(mpi, grpc, strict=True):
        for case in CASES:
            assert harness.difference(mine[case]["weights"], other[case]["weights"]) == 0, case


@pytest.mark.full
def test_compressed_gradients_train_what_they_do_by_grpc_to_the_bit(tmp_path):
    harness.check_trained_alike(harness.mpirun("transport_program", tmp_path), "mpi")


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.slow)])
def test_compressors_exchange_what_they_do_by_grpc(tmp_path, size):
    mpi, grpc = (
        harness.mpirun("compression_program", tmp_path / transport, *PARTS, size=size, transport=transport)
        for transport in ("mpi", "grpc")
    )
    harness.check_exchanges(mpi, grpc)


@pytest.mark.slow
def test_compressors_exchange_what_they_do_by_grpc_where_ranks_share_a_host(tmp_path, monkeypatch):
    monkeypatch.setenv(harness.HOSTS, "a,a,b")  # ranks of a host are a branch of the tree of sums: equal bits
    test_compressors_exchange_what_they_do_by_grpc(tmp_path, 3)


@pytest.mark.full
def test_ranks_that_do_different_things_say_so(tmp_path):
    for results in harness.mpirun("mismatched_calls_program", tmp_path, "callback", ends_well=False):
        assert results["said"].startswith("Workers did different things at once: worker:0 was in fit"), results["said"]


@pytest.mark.full
def test_a_rank_without_data_is_named(tmp_path):
    for results in harness.mpirun("mismatched_calls_program", tmp_path, "fit", ends_well=False):
        assert results["said"].startswith("A dataset has fewer batches on some workers than on others"), results["said"]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_sums_are_those_of_numpy_and_waiting_takes_no_processor(size):
    command = [*harness.MPIRUN, "-np", str(size), sys.executable, "-m", "tests.collectives.mpi_rank"]
    environ = harness.mpi_environ("mpi")
    done = subprocess.run(command, env=environ, cwd=harness.ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.count("done") == size, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("hosts", [[[0, 2], [1, 3]], [[0, 1], [2]]])
def test_sums_by_host_are_those_of_numpy(tmp_path, hosts):
    size = sum(map(len, hosts))
    words = ["tests.collectives.two_level_rank", str(tmp_path), json.dumps(hosts), "mpi", "well"]
    command = [*harness.MPIRUN, "-np", str(size), sys.executable, "-m", *words]
    environ = harness.mpi_environ("mpi")
    done = subprocess.run(command, env=environ, cwd=harness.ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.count("done") == size, done.stdout + done.stderr


@pytest.mark.full
def test_ranks_of_a_host_that_share_no_memory_exchange_by_mpi(tmp_path, monkeypatch):
    """A limit of the size of files, which memory has too, keeps rank 0 from making any."""
    program = (
        "import os, resource, sys\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '0':\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))\n"
        "import numpy as np, tfdist\n"
        "from tests.multiprocess import harness\n"
        "trainer = tfdist.Trainer('multi_worker_mirrored', **harness.transport())\n"
        "transport = trainer.strategy.communicator.transport\n"
        "print(type(transport).__name__, transport.all_reduce(np.ones(3)), flush=True)\n"
    )
    monkeypatch.setenv(harness.HOSTS, "a,a,b")
    command = [*harness.MPIRUN, "-np", "3", sys.executable, "-c", program]
    environ = harness.mpi_environ("mpi")
    done = subprocess.run(command, env=environ, cwd=harness.ROOT, capture_output=True, text=True, timeout=200)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    # Lines of ranks may mix.
    assert [done.stdout.count(each) for each in ("MpiTransport", "[3. 3. 3.]")] == [3, 3], said
    reason = "workers of one host cannot share memory, and exchange gradients by mpi, too: rank 0: no memory of "
    assert said.count(reason) == 1 and said.count("gradients travel by mpi:") == 1, said


@pytest.mark.full
def test_without_mpi4py_it_says_what_to_install():
    program = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "import tfdist; tfdist.Trainer('multi_worker_mirrored', transport='mpi')"
    )
    command = [*harness.MPIRUN, "-np", "2", sys.executable, "-c", program]
    environ = harness.mpi_environ("mpi")
    done = subprocess.run(command, env=environ, cwd=harness.ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    sentence = "mpi4py is not installed: pip install 'tfdist[mpi]'. Use strategy.transport=grpc."
    assert f"ConfigError: strategy.transport=mpi is not possible: {sentence}" in done.stderr + done.stdout, done.stderr


def lose(tmp_path, how, rank=1, size=2):
    """Starts ranks of which one is lost amid training; returns mpirun's process, and where it writes."""
    log = tmp_path / "log"
    command = [*harness.MPIRUN, "-np", str(size), sys.executable, "-m", "tests.multiprocess.lost_worker_program"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(rank), how],
            env=harness.mpi_environ("mpi"),
            cwd=harness.ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return process, log


def end(process):
    for each in [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
        each.send_signal(signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize("how", ["kill", "error", "exit"])
def test_a_rank_that_ends_amid_training_ends_all(tmp_path, how):
    process, log = lose(tmp_path, how)
    try:
        assert process.wait(180) != 0
        assert "it happens" in log.read_text(), log.read_text()
    finally:
        end(process)


@pytest.mark.full
@pytest.mark.parametrize("rank", [1, 2])
def test_the_end_of_a_leader_or_another_rank_ends_all_hosts(tmp_path, monkeypatch, rank):
    monkeypatch.setenv(harness.HOSTS, "a,b,a,b")
    process, log = lose(tmp_path, "kill", rank, size=4)
    try:
        assert process.wait(240) != 0
        text = log.read_text()
        assert "it happens" in text, text
        assert text.count("gradients travel by mpi between 2 hosts, and by shared memory within:") == 1, text
    finally:
        end(process)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["a,a", "a,b,b"])  # in the latter the rank leads a host
def test_a_rank_that_stays_stopped_is_given_up_by_name(tmp_path, monkeypatch, hosts):
    monkeypatch.setenv(harness.HOSTS, hosts)
    process, log = lose(tmp_path, "stop", size=len(hosts.split(",")))
    try:
        began = time.monotonic()
        while "it happens" not in log.read_text():
            assert time.monotonic() - began < 120, log.read_text()
            time.sleep(0.2)
        began = time.monotonic()
        assert process.wait(240) != 0
        assert time.monotonic() - began > 50
        told = re.search(r"ClusterError: worker:0 waits for worker:1 at \S+: no answer for 6", log.read_text())
        assert told, log.read_text()
    finally:
        end(process)


@pytest.mark.full  # test_shared_memory.py has a transport that all workers refuse
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--start"], "MPI connects only what it has started: start the workers by mpirun"),
        ([], "MPI waits for all that mpirun or srun has started"),
    ],
)
def test_who_cannot_use_mpi_is_told_so_on_all_workers(tmp_path, options, sentence):
    """Without mpirun, or as a cluster within what mpirun has started."""
    program = 'import tfdist; tfdist.Trainer("multi_worker_mirrored", transport="mpi")'
    command = [
        sys.executable,
        "-m",
        "tfdist.launch",
        "--workers=2",
        f"--log_dir={tmp_path}",
        "--",
        sys.executable,
        "-c",
        program,
    ]
    start = [] if options else [*harness.MPIRUN, "-np", "1"]
    done = subprocess.run(
        [*start, *command],
        env=harness.mpi_environ("mpi"),
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    for rank in range(2):
        said = (tmp_path / f"worker-{rank}.log").read_text()
        assert f"ConfigError: strategy.transport=mpi is not possible: {sentence}" in said, said + done.stderr


@pytest.mark.full
@pytest.mark.parametrize(("how", "what"), [("callback", "is at"), ("map", "waits for its data at")])
def test_the_rank_that_hangs_is_named_with_its_line(tmp_path, how, what):
    program = "tests.multiprocess.hang_program"
    command = [*harness.MPIRUN, "-np", "2", sys.executable, "-m", program, how, "1", "5", str(tmp_path)]
    done = subprocess.run(
        ["timeout", "200", *command], env=harness.mpi_environ("mpi"), cwd=harness.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert f"tfdist.errors.ClusterError: worker:1 {what} tests/multiprocess/hang_program.py:" in done.stderr
