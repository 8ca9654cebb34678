"""Ctrl-C in the first moments of a command: one line, exit code 130, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.helpers.launched_job import until

ENDED = "tfdist: ended by Ctrl-C (SIGINT)\n"
# Sends SIGINT while a module is being imported, within a callback that swallows exceptions, as the import system has some.
INTERRUPTED_IMPORT = """
import os, runpy, signal, sys, weakref
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            key = Finder()
            reference = weakref.ref(key, lambda _: (os.kill(os.getpid(), signal.SIGINT), [None for _ in range(1000)]))
            del key
sys.meta_path.insert(0, Finder())
sys.argv = {argv!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
LAUNCH, TRAIN = ["launch", "--", "echo", "started"], ["train", "--config=digits", "--workdir=run"]


@pytest.mark.parametrize(
    ("module", "words", "name"),
    [
        ("tfdist", LAUNCH, "tfdist.runtime.end.process_end"),
        ("tfdist", LAUNCH, "tfdist.launch.launcher"),
        ("tfdist", TRAIN, "tfdist.commands.train"),
        ("tfdist.train", TRAIN[1:], "tfdist.commands.train"),
        ("tfdist.train", TRAIN[1:], "tfdist.config.validation"),
    ],
)
def test_ctrl_c_while_a_command_imports(tmp_path, module, words, name):
    code = INTERRUPTED_IMPORT.format(name=name, argv=["tfdist", *words], module=module)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", ENDED)


def started(launcher, title):
    """Returns whether a launcher has a child with a text in its command line, which it has not ended."""
    return any(title in " ".join(child.cmdline()) for child in psutil.Process(launcher.pid).children())


@pytest.mark.parametrize("title", ["launch/spare.py", "-SEc"], ids=["spare", "guardian"])
def test_ctrl_c_before_the_first_task(job, title, monkeypatch):
    # The spare waits in its import until the launcher ends it.
    (job.folder / "keras.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(job.folder), prepend=os.pathsep)
    process = job.start("import keras\nprint('started')", "--workers=2")
    until(lambda: started(process, title))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert job.output() == "tfdist: SIGINT: ending; no task runs\n"
    assert not job.alive()


def test_ctrl_c_while_python_starts_in_tasks(job, monkeypatch):
    code = "import os, time\nif 'TF_CONFIG' in os.environ:\n    print('begins', flush=True)\n    time.sleep(600)\n"
    (job.folder / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(job.folder), prepend=os.pathsep)
    process = job.start("print('started')", "--workers=2")
    until(lambda: job.output().count("begins") == 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    lines = [line for line in job.output().splitlines() if not line.endswith("begins")]
    assert len(lines) == 1 and lines[0].startswith("tfdist: SIGINT: ending all tasks"), job.output()
    assert "Fatal Python error" in job.log("worker-0")


def test_ctrl_c_while_tasks_import_tensorflow(job):
    process = job.start(
        "print('begins', flush=True)\nimport tensorflow, tfdist\nsleep_for_ever()", "--workers=2", "--warm=0"
    )
    until(lambda: job.output().count("begins") == 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    lines = [line for line in job.output().splitlines() if not line.endswith("begins")]
    assert len(lines) == 1 and lines[0].startswith("tfdist: SIGINT: ending all tasks"), job.output()
    assert not job.alive()


def test_ctrl_c_while_the_tasks_of_a_local_training_start(tmp_path):
    words = ["--config=digits_multi_worker", "--workdir=run", "--config.cluster.warm=0"]
    command = [sys.executable, "-m", "tfdist", "train", *words]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            until(lambda: started(process, "tfdist.train"))
            tasks = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert output.count("tfdist: ") == 1 and output.startswith("tfdist: SIGINT: ending all tasks"), output
    until(lambda: not any(task.is_running() for task in tasks))
