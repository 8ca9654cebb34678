"""What a user's own training begins with: jobs for schedulers, a notebook."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest
import yaml

from tests.docs.pages import commands
from tests.helpers import local_slurm
from tests.helpers.launched_job import until

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BIN = str(pathlib.Path(sys.executable).parent)


def run(words, folder, **more):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{BIN}:{os.environ['PATH']}", **more}
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.full
def test_a_copy_of_the_example_passes_its_tests(tmp_path):
    shutil.copytree(EXAMPLES / "my_task", tmp_path / "my_task")
    tested = run([sys.executable, "-m", "pytest", "my_task"], tmp_path).stdout
    assert "4 passed" in tested, tested


JOBS = {"slurm": EXAMPLES / "slurm/my_task.sh", "kubernetes": EXAMPLES / "kubernetes/my_task.yaml"}


@pytest.mark.parametrize("target", JOBS)
def test_a_job_is_what_the_command_of_its_page_writes(target):
    (emit,) = (
        each.text
        for each in commands()
        if each.page == "docs/examples/schedulers.md" and f"emit --target={target} " in each.text
    )
    written = run(["sh", "-c", emit.partition(" > ")[0]], EXAMPLES)
    assert written.stdout == JOBS[target].read_text()
    assert written.stderr == "", "a task's module loads no TensorFlow"


def test_the_manifests_are_as_the_release_has_them():
    import kubernetes_validate

    for manifest in yaml.safe_load_all(JOBS["kubernetes"].read_text()):
        kubernetes_validate.validate(manifest, "1.37", strict=True)


@pytest.mark.full
def test_slurm_trains_what_its_job_says(tmp_path):
    if reason := local_slurm.missing():
        pytest.skip(reason)
    (tmp_path / "my_task").symlink_to(EXAMPLES / "my_task")
    log = tmp_path / "log"
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, local_slurm.running(pathlib.Path(folder)) as more:
        # Less memory than it asks for: the node has little.
        run(["sbatch", "--mem-per-cpu=400M", f"--output={log}", JOBS["slurm"]], tmp_path, **more)
        until(lambda: not run(["squeue", "-h"], tmp_path, **more).stdout, 250)
    summary = json.loads((tmp_path / "runs/my_task/summary.json").read_text())
    assert (summary["cluster"], summary["epochs"]) == ({"worker": 2}, 5), log.read_text()
    assert summary["metrics"]["val_accuracy"] > 0.9


def said(cells):
    """Returns the lines that each cell has printed, without their numbers."""
    numbers = re.compile(r"\d+s - \d+[mu]?s/step|\d+(\.\d+)?(e-\d+)?")
    printed = [
        "".join(each["text"] for each in cell.get("outputs", ()) if each.get("name") == "stdout") for cell in cells
    ]
    return [numbers.sub("0", text).splitlines() for text in printed], "".join(printed)


@pytest.mark.full
def test_the_notebook_prints_what_it_shows(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    shown, _ = said(notebook.cells)
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    lines, text = said(notebook.cells)
    # A worker that waits long for the other says so: such lines are left out.
    assert [[line for line in some if line in expected] for some, expected in zip(lines, shown, strict=True)] == shown
    assert text.count("2 replicas") == 3 and "less than 1e-5: True" in text
    accuracies = re.findall(r"validation accuracy ([\d.]+)", text)
    assert len(accuracies) == 2 and all(float(accuracy) > 0.9 for accuracy in accuracies)
