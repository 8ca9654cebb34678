"""`tfdist stacks --serve`: the page of a real job of two workers, its token, and its end."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from tests.helpers import browser
from tests.helpers.launched_job import until
from tests.multiprocess.harness import ROOT

SCRIPT = """
import pathlib, time
import tfdist
trainer = tfdist.Trainer("multi_worker_mirrored")
import keras, numpy as np

class Slow(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pathlib.Path(f"here-{trainer.is_chief}").touch()
        if trainer.is_chief:
            time.sleep(300)

with trainer.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((8, 1)), np.ones((8, 1)), epochs=2, verbose=0, callbacks=[Slow()])
"""


@pytest.fixture
def job(tmp_path):
    """The folder of a job whose second worker waits for the first one, which is in a callback."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "tfdist.launch", "--workers=2", "--log_dir=logs", "--", sys.executable]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [*command, "script.py"], cwd=tmp_path, env=environ, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        until(lambda: all((tmp_path / f"here-{chief}").exists() for chief in (True, False)), 120)
        yield tmp_path / "logs"
    finally:
        process.kill()  # its guardian kills the tasks
        process.wait()


@pytest.fixture
def page(job):
    """The process that serves the job's page, and the page's address."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tfdist.commands.stacks", str(job), "--serve"],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, re.match(r"(http://127\.0\.0\.1:\d+/\S+) shows", process.stdout.readline())[1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def text(address):
    with urllib.request.urlopen(address, timeout=60) as answer:
        return answer.read().decode()


def test_the_page_shows_all_tasks_to_those_who_know_its_token(page, tmp_path):
    process, address = page
    until(lambda: "worker:1  waits for others" in text(address))
    shown = text(address)
    assert re.search(r"worker:0  .* at .*script.py:11 in on_epoch_end", shown)
    assert re.search(r"behind: worker:0 at .*script.py:11", shown)
    assert "worker:1: the stacks of all threads" in shown
    for wrong in (f"{address}x", address[:-1], address.rpartition("/")[0]):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            text(wrong)
    if browser.CHROMIUM:
        with browser.page(tmp_path / "profile") as chromium:
            chromium.open(address)
            seen = chromium.wait(
                "document.body ? document.body.innerText : ''",
                lambda seen: "worker:0" in seen and "worker:1  waits for others" in seen,
            )
            assert "behind: worker:0 at " in seen
            # The page comes anew by itself.
            chromium.evaluate("window.isFirst = true")
            assert chromium.wait("window.isFirst !== true && document.body !== null", bool)
            chromium.wait("document.body.innerText", lambda seen: "worker:1  waits" in seen)
            assert [each for each in chromium.errors if "favicon" not in each.get("url", "")] == []
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


def test_a_port_that_is_taken_is_an_error(page, job):
    _, address = page
    port = re.search(r":(\d+)/", address)[1]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.commands.stacks", str(job), f"--serve={port}"],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"cannot serve at 127.0.0.1:{port}: Address already in use. Choose another port" in done.stderr
