"""The table of the tasks in a pseudo-terminal: what the screen shows, and how it is left."""

import re
import sys

import pytest

from tests.helpers.launched_job import PRELUDE, PROGRESS
from tests.helpers.terminal import Terminal
from tfdist.launch.live_table import Pace
from tfdist.runtime.report.progress import Progress

# A task that tells its steps as a training does, until it is told to end.
SCRIPT = (
    PROGRESS
    + """
name = f"{TASK['type']}-{TASK['index']}"
print("begins " + "x" * 150, flush=True)
METRICS = {"accuracy": 0.98765432, "loss": 0.25, "val_top_five_categorical_accuracy": float("nan"), "names": "no number"}
step = 0
while not pathlib.Path("go").exists():
    step += 1
    progress.write(done=step, epoch=2, epochs=3, total=9000, metrics=METRICS)
    if step % 20 == 0:
        print("at step", step, flush=True)
    time.sleep(0.02)
print("last words of", name, flush=True)
if pathlib.Path("go").read_text() == "fail" and TASK["index"] == 1:
    raise ValueError("odd")
"""
)
ROW = r"worker:{} +training +2/3 +\d+/9000 +\d+\.\d +\d+:\d\d +0\.25 +0\.9877\n?"


@pytest.fixture
def launched(tmp_path):
    opened = []

    def start(**environ):
        (tmp_path / "script.py").write_text(PRELUDE + SCRIPT)
        command = [sys.executable, "-m", "tfdist.launch", "--workers=2", "--", sys.executable, "script.py"]
        opened.append(Terminal(command, tmp_path, environ))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("succeed", 0, "[worker:1] last words of worker-1"),
        pytest.param(
            "fail",
            1,
            "tfdist: worker:1 failed with exit code 1: ValueError: odd; ending all tasks",
            marks=pytest.mark.full,
        ),
        ("ctrl-c", 130, "tfdist: SIGINT: ending all tasks"),
    ],
)
def test_the_screen_shows_each_task_below_the_lines_and_is_left_in_order(launched, tmp_path, end, code, last):
    terminal = launched()
    table = re.compile(ROW.format(0) + ROW.format(1) + r"\Z")
    terminal.until(lambda: "at step 40" in terminal.text() and table.search(terminal.text()))
    # The loss first; of the other metrics those for which a terminal of 100 columns has room.
    assert re.search(r"task +state +epoch +step +steps/s +time left +loss +accuracy\n", terminal.text())
    assert not terminal.screen.cursor_is_shown

    def rate():
        found = re.search(r"/9000 +(\d+\.\d)", terminal.text())
        return float(found[1]) if found else 0.0

    # A step takes 0.02 s and a little more. A look that comes early or late tells another rate, and the next ones make up for it.
    terminal.until(lambda: 5 < rate() < 75)
    terminal.resize(160)  # where it gets narrower, a row that is just being drawn may be left
    terminal.until(
        lambda: re.search(r"accuracy +val_top_five_categorical_accuracy\n(.* +0\.9877 +nan\n?){2}\Z", terminal.text())
    )
    terminal.until(lambda: all(f"[worker:{task}] at step 80\n" in terminal.text() for task in range(2)))
    if end == "ctrl-c":
        terminal.type("\x03")
    else:
        (tmp_path / "go").write_text(end)
    assert terminal.wait() == code
    assert terminal.screen.cursor_is_shown
    shown = terminal.text()
    assert last.replace(" ", "") in re.sub(r"\s", "", shown)
    assert "task    state" not in shown and "training" not in shown
    for task in range(2):
        assert f"[worker:{task}] begins {'x' * 150}" in shown.replace("\n", "")
        for step in (20, 40, 60, 80):
            assert shown.count(f"[worker:{task}] at step {step}\n") == 1
        if end == "succeed":
            assert f"[worker:{task}] last words of worker-{task}" in shown


def test_a_dumb_terminal_gets_plain_lines(launched, tmp_path):
    terminal = launched(TERM="dumb")
    (tmp_path / "go").write_text("succeed")
    assert terminal.wait() == 0
    assert "[worker:0] last words of worker-0" in terminal.text()
    assert "\x1b" not in terminal.output and "steps/s" not in terminal.output


def test_the_pace_is_that_of_the_last_seconds_and_the_rest_that_of_the_whole():
    pace = Pace()
    pace.look(0.0, Progress(total=1000))
    assert pace.rate is None and pace.seconds_left is None
    for second in range(30, 51):  # a compilation of 30 s, then 10 steps in each second
        pace.look(float(second), Progress(done=10 * (second - 29), total=1000))
    assert pace.rate == pytest.approx(10)
    assert pace.seconds_left == pytest.approx((1000 - 210) / 10)
    pace.look(70.0, Progress(done=210, total=1000))  # a validation
    assert pace.rate == 0 or pace.rate is not None
    assert pace.seconds_left == pytest.approx((1000 - 210) / (200 / 40))
    pace.look(71.0, Progress())  # another training
    assert pace.rate is None and pace.seconds_left is None
    pace.look(72.0, Progress(done=5))
    pace.look(73.0, Progress(done=15))
    assert pace.rate == pytest.approx(10) and pace.seconds_left is None
