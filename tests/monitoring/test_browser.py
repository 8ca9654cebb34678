"""TensorBoard in a browser: the pages of a run of two workers, as headless Chromium shows them. Its `page.png` is README's picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request

import pytest

from tests.helpers import browser
from tests.monitoring.test_tensorboard import server, wait
from tests.multiprocess.harness import ROOT

CHARTS = """
findAll("tf-custom-scalar-multi-line-chart-card").map(card => [
  findAll("tf-card-heading", card.shadowRoot)[0].shadowRoot.textContent.split("}").pop().trim(),
  findAll(".match-list-entry", card.shadowRoot).map(entry => entry.innerText.trim().replace(/^\\W+/, "")).sort(),
])
"""
# For each chart, how many lines are drawn.
LINES = """
findAll("vz-line-chart2").map(chart => findAll("path", chart.shadowRoot).filter(path => path.getTotalLength() > 50).length)
"""
# For each chart, the colors of its lines.
COLORS = """
findAll("vz-line-chart2").map(chart => [...new Set(findAll("path", chart.shadowRoot)
  .filter(path => path.getTotalLength() > 50).map(path => getComputedStyle(path).stroke))].sort())
"""
ORANGE, BLUE, CYAN = "rgb(255, 112, 67)", "rgb(0, 119, 187)", "rgb(51, 187, 238)"
TEXT = 'findAll("*").map(element => element.shadowRoot ? element.shadowRoot.textContent : "").join() + (document.body ? document.body.innerText : "")'


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """The work directory of a run that is over."""
    if not browser.CHROMIUM:
        pytest.skip("no chromium")
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "tfdist.train", f"--config={ROOT}/configs/digits_multi_worker.py"]
    options = ["--workdir=runs/digits", "--config.epochs=10", "--config.monitoring.update_freq=5"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *options],
        cwd=folder,
        env=environ,
        timeout=200,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.full
def test_the_pages_of_a_run_are_there_and_without_errors(workdir, tmp_path, monkeypatch):
    monkeypatch.chdir(workdir)  # so that the picture has a short path
    with server("runs/digits/tensorboard") as ask, browser.page(tmp_path / "profile") as page:
        wait(ask, lambda found: {"train", "validation", "worker-1", "hparams"} <= found.keys())
        page.open(f"{ask.address}/#custom_scalars")
        expected = {
            "Is it learning? (loss)": ["batch_loss (train)", "evaluation_loss_vs_iterations (validation)"],
            "How fast is it? (examples per second)": [
                "perf/examples_per_second (train)",
                "perf/examples_per_second (worker-1)",
            ],
            "Who is slow? (ms per step)": ["perf/own_step_ms (train)", "perf/own_step_ms (worker-1)"],
        }
        expected["What did the network cost? (bytes per step)"] = [
            f"comm/bytes_per_step ({run})" for run in ("train", "worker-1")
        ]
        # The lines of a chart come one by one.
        charts = dict(page.wait(CHARTS, lambda found: {**dict(found), **expected} == dict(found)))
        assert charts == expected
        drawn = page.wait(LINES, lambda found: all(found[:3]))
        assert all(drawn[:3]), drawn
        # TensorBoard gives its colors in the order of the runs: those of the tasks are told apart.
        with urllib.request.urlopen(f"{ask.address}/data/runs") as got:
            assert json.load(got) == ["train", "worker-1", "hparams", "validation"]
        page.wait(LINES, lambda found: all(found[:4]))
        assert page.evaluate(COLORS) == [sorted([ORANGE, CYAN]), *[sorted([ORANGE, BLUE])] * 3]
        page.screenshot(tmp_path / "page.png")
        for tab, words in {
            "text": ["Custom Scalars", "worker:1", "versions"],  # the other texts are loaded when they are scrolled to
            "hparams": ["compression.name", "Trial ID"],
        }.items():
            page.open(f"{ask.address}/?{tab}#{tab}")
            text = page.wait(TEXT, lambda text, words=words: all(word in text for word in words))
            assert [word for word in words if word not in text] == []
        assert page.errors == []
        page.evaluate("console.error('is seen')")
        assert len(page.errors) == 1
