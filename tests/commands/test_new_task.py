"""`tfdist new-task`: the files that it writes, which pass their tests and train, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest

from tests.end_to_end.test_starters import EXAMPLES, run
from tfdist import __main__ as command


def texts(package):
    return {path.name: path.read_text() for path in package.iterdir() if path.is_file()}


def test_the_example_is_what_the_command_writes(tmp_path):
    assert command.main(["tfdist", "new-task", "my_task", f"--dir={tmp_path}"]) == 0
    assert texts(tmp_path / "my_task") == texts(EXAMPLES / "my_task")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["new-task", "my_task"], "{tmp}/my_task exists already; choose another name, or another folder with --dir.\n"),
        (
            ["new-task", "my-task"],
            "The name of a task must be a Python identifier, such as my_task. Received: 'my-task'.\n",
        ),
        (
            ["new-task", "class"],
            "The name of a task must be a Python identifier, such as my_task. Received: 'class'.\n",
        ),
        (["new-task", "none"], "The name of a task must be a Python identifier, such as my_task. Received: 'none'.\n"),
        (
            ["new-task", "json"],
            "json is the name of an importable module, which the task would hide; choose another name.\n",
        ),
        (["new_task", "a", "b"], "Usage: tfdist new-task NAME [--dir=DIR]. Received: a b --dir={tmp}\n"),
        (["new-task", "a", "--dirs=b"], "unknown flag '--dirs'; did you mean '--dir'? Known: --dir, --help.\n"),
    ],
)
def test_what_the_command_refuses_is_one_sentence_and_no_file(words, said, tmp_path, capsys):
    (tmp_path / "my_task").mkdir()
    assert command.main(["tfdist", *words, f"--dir={tmp_path}"]) == 2
    assert capsys.readouterr() == ("", said.format(tmp=tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["my_task"]


@pytest.mark.full
def test_a_new_task_passes_its_tests_and_trains(tmp_path):
    run([sys.executable, "-m", "tfdist", "new-task", "MyTask_of_flowers"], tmp_path)
    tested = run([sys.executable, "-m", "pytest", "MyTask_of_flowers"], tmp_path).stdout
    assert "4 passed" in tested, tested
    options = ["--config.epochs=1", "--config.steps_per_epoch=2", "--config.task_options.units=8"]
    for workers in (1, 2):
        train = [
            sys.executable,
            "-m",
            "tfdist.train",
            "--config=MyTask_of_flowers/config.py",
            f"--workdir=runs/{workers}",
        ]
        run([*train, *options, f"--config.cluster.workers={workers}"], tmp_path)
        summary = json.loads((tmp_path / f"runs/{workers}/summary.json").read_text())
        assert (summary["task"], summary["num_replicas"], summary["steps"]) == (
            "MyTask_of_flowers.task:MyTaskOfFlowers",
            workers,
            2,
        )
