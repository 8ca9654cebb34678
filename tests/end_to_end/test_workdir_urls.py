"""`tfdist train --workdir=s3://...`: the files of a run at a URL, after kills and failures of the storage."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import fsspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers import fork_server, gate, s3, tiers
from tests.helpers.launched_job import until
from tfdist.cluster.local import free_ports

ROOT = pathlib.Path(__file__).parents[2]
EPOCHS = 4
DETERMINED = ("batch_", "epoch_", "evaluation_", "final/")  # tags of values that two equal runs share


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3.running(tmp_path_factory.mktemp("s3")) as running:
        yield running


def start(workdir, server, *flags, config="digits_multi_worker", forked=False, **variables):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    words = [f"--config={config}", f"--workdir={workdir}", f"--config.epochs={EPOCHS}", *flags]
    return subprocess.Popen(
        fork_server.command("tfdist.train", *words) if forked else [sys.executable, "-m", "tfdist", "train", *words],
        cwd=ROOT,
        env={**environ, "PYTHONPATH": str(ROOT), **server.environ, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process):
    try:
        return process.communicate(timeout=200)[0]
    finally:
        process.kill()


def download(server, name, folder):
    """Copies a folder of the bucket, and returns the local one."""
    options = {"key": server.environ["AWS_ACCESS_KEY_ID"], "secret": server.environ["AWS_SECRET_ACCESS_KEY"]}
    files = fsspec.filesystem(
        "s3",
        endpoint_url=server.environ["AWS_ENDPOINT_URL"],
        skip_instance_cache=True,
        use_listings_cache=False,
        **options,
    )
    files.get(f"{s3.BUCKET}/{name}", str(folder), recursive=True)
    return folder


def curves(folder):
    """The steps of each curve by run and tag, with the values that do not depend on the time. Own step times count from a restart on."""
    read = {}
    for run in sorted(path for path in (folder / "tensorboard").iterdir() if path.is_dir()):
        events = EventAccumulator(str(run), {"tensors": 0, "scalars": 0}).Reload()
        for tag in events.Tags()["tensors"]:
            if tag != "perf/own_step_ms" and tag.startswith(("batch_", "epoch_", "evaluation_", "final/", "perf/")):
                read[run.name, tag] = [
                    (event.step, event.tensor_proto.float_val[0] if tag.startswith(DETERMINED) else None)
                    for event in events.Tensors(tag)
                ]
    return read


@pytest.mark.parametrize("workers", tiers.cases([1, 2], quick=1))
def test_a_run_at_a_url_whose_processes_are_killed_has_the_files_of_a_local_one(server, tmp_path, workers):
    local, opened, url = tmp_path / "local", tmp_path / "open", f"{server.url}/run-{workers}"
    config, forked = ("digits_multi_worker", False) if workers > 1 else ("digits", True)
    common = {"config": config, "forked": forked}
    reference = start(local, server, "--config.backup.save_freq=11", gate.flag(tmp_path, 1), **common)
    flags = ["--config.backup.save_freq=11", gate.flag(opened, 3)]
    process = start(url, server, *flags, **common)
    try:
        printed = finish(reference)
        assert reference.returncode == 0, printed
        until(
            lambda: f"run-{workers}/backup/step-44/manifest.json" in server.files() or process.poll() is not None, 200
        )
        fork_server.kill(process)  # the guardian kills the tasks of a launcher
        finish(process)
        opened.touch()
        output = finish(process := start(url, server, *flags, **common))
    finally:
        for each in (reference, process):
            each.kill()
            if each.stdout:
                each.stdout.close()
    assert process.returncode == 0, output
    assert f"workdir: {url}" in output and server.environ["AWS_SECRET_ACCESS_KEY"] not in output
    folder = download(server, f"run-{workers}", tmp_path / "downloaded")
    assert {path.name for path in folder.iterdir()} == {path.name for path in local.iterdir() if path.name != "backup"}
    assert curves(folder) == curves(local)
    ours, theirs = (json.loads((path / "summary.json").read_text()) for path in (folder, local))
    for name in ("metrics", "steps", "epochs", "num_replicas", "cluster"):
        assert ours[name] == theirs[name]
    if workers > 1:
        assert "Epoch 1/4" in (folder / "logs" / "before" / "worker-0.log").read_text()
    assert server.environ["AWS_SECRET_ACCESS_KEY"] not in (folder / "config.json").read_text()


@pytest.mark.full
def test_tasks_of_a_scheduler_upload_their_own_curves_after_sigterm(server, tmp_path):
    ports = free_ports(2)
    workers = [f"127.0.0.1:{port}" for port in ports]
    tasks = []
    try:
        for index in range(2):
            about = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
            flags = ["--config.backup.save_freq=11", gate.flag(tmp_path / "open", 3)]
            tasks.append(start(f"{server.url}/jobs", server, *flags, TF_CONFIG=json.dumps(about)))
        until(lambda: "jobs/backup/step-44/manifest.json" in server.files() or tasks[0].poll() is not None, 200)
        tasks[0].send_signal(signal.SIGTERM)
        (tmp_path / "open").touch()
        output = [finish(task) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [75, 75], output
    assert "jobs/run" not in server.files(), "removed after the last upload"
    steps = {name: series[-1][0] for name, series in curves(download(server, "jobs", tmp_path / "jobs")).items()}
    assert steps["train", "batch_loss"] == 40, "one value for 20 steps"
    assert {run for run, _ in steps} >= {"train", "worker-1"}
