"""The end of a run in a terminal, in a pipe and in a file."""

import io
import json
import pathlib
import sys

import pytest

from tests.helpers.terminal import Terminal
from tfdist.commands import summary_table

ROOT = pathlib.Path(__file__).parents[2]
WORKDIR = pathlib.Path("runs/demo")
ONE_DEVICE = {
    "task": "digits",
    "strategy": "one_device",
    "num_replicas": 1,
    "cluster": {"worker": 1},
    "batch_size": 64,
    "epochs": 1,
    "steps": 1,
    "metrics": {"loss": 0.123456789, "val_f1": [0.5, None], "val_loss": None},
    "examples_per_second": None,
    "step_ms": {"mean": None, "median": None, "p95": None},
    "compression": {"name": "none"},
    "wire_bytes_per_step": {"predicted": None, "measured": None},
    "restarts": 0,
    "wall_seconds": 3.2,
    "goodput": {
        "wall_seconds": 5.66,
        "productive": 0.5,
        "seconds": {"steps": 2.83, "startup": 2.83, "repeated_steps": 0.0},
    },
}
WORKERS = {
    **ONE_DEVICE,
    "strategy": "multi_worker_mirrored",
    "num_replicas": 2,
    "metrics": {"val_accuracy": 0.975},
    "examples_per_second": 2660.0,
    "step_ms": {"mean": 24.06, "median": 23.5, "p95": 30.766},
    "compression": {"name": "powersgd", "matrix_approximation_rank": 4},
    "wire_bytes_per_step": {
        "predicted": 9000,
        "measured": 9100,
        "before_compression": {"predicted": 80000, "measured": None},
    },
    "restarts": 1,
    "ended_early": "21 of 25 epochs (EarlyStopping)",
    "sizes": [{"step": 0, "workers": 2}, {"step": 40, "workers": 1}],
}
SERVERS = {
    **ONE_DEVICE,
    "strategy": "parameter_server",
    "num_replicas": 3,
    "metrics": {},
    "retried_steps": 2,
    "staleness": {"mean": 0.963, "max": 4},
    "bytes_per_server": {"ps:0": 1},
}


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        (
            ONE_DEVICE,
            """task: digits
            strategy: one_device
            replicas: 1
            global batch: 64
            loss: 0.123457
            val_f1: [0.5, not finite]
            val_loss: not finite
            restarts: 0
            wall time: 5.66 s: steps 2.83 s, startup 2.83 s
            workdir: runs/demo
            tensorboard --logdir runs/demo/tensorboard
            then open http://localhost:6006/#custom_scalars""",
        ),
        (
            WORKERS,
            """task: digits
            strategy: multi_worker_mirrored
            replicas: 2
            workers over time: 2 from step 0, 1 from step 40
            global batch: 64
            ended early: 21 of 25 epochs (EarlyStopping)
            val_accuracy: 0.975
            speed: 24.1 ms a step, 2,660 examples/s, validation not counted
            compression: powersgd
            network bytes per step: 9,100 (prediction for the gradients alone: 9,000 bytes)
            network bytes per step before compression: not measured (prediction for the gradients alone: 80,000 bytes)
            restarts: 1
            wall time: 5.66 s: steps 2.83 s, startup 2.83 s
            workdir: runs/demo
            tensorboard --logdir runs/demo/tensorboard
            then open http://localhost:6006/#custom_scalars""",
        ),
        (
            SERVERS,
            """task: digits
            strategy: parameter_server
            workers: 3
            batch per worker: 64
            retried steps: 2
            staleness: mean 0.963, max 4
            restarts: 0
            wall time: 5.66 s: steps 2.83 s, startup 2.83 s
            workdir: runs/demo
            tensorboard --logdir runs/demo/tensorboard
            then open http://localhost:6006/#custom_scalars""",
        ),
    ],
    ids=lambda value: value["strategy"] if isinstance(value, dict) else "",
)
def test_rows_are_what_was_measured(summary, expected, capsys):
    lines = [line.strip() for line in expected.splitlines()]
    assert [f"{name}: {value}" for name, value in summary_table.rows(summary, WORKDIR)] == lines[:-2]
    summary_table.print_summary(summary, WORKDIR)
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    ("transport", "sent", "expected"),
    [
        ("shared_memory", (1252, 85928), "1,252 (gradients travel through shared memory: 85,928 bytes)"),
        ("shared_memory", (None, 85928), "not measured (gradients travel through shared memory: 85,928 bytes)"),
        ("shared_memory", (1252, None), "1,252 (gradients travel through shared memory)"),
        ("grpc", (87679, 85928), "87,679 (prediction for the gradients alone: 85,928 bytes)"),
        (None, (87679, None), "87,679"),
        ("grpc", (None, 85928), "not measured (prediction for the gradients alone: 85,928 bytes)"),
        ("grpc", (None, 0), None),
    ],
)
def test_one_line_tells_the_bytes_of_the_network_from_those_of_the_gradients(transport, sent, expected):
    wire_bytes = dict(zip(("measured", "predicted"), sent, strict=True))
    summary = {**ONE_DEVICE, "transport": transport, "wire_bytes_per_step": wire_bytes}
    assert dict(summary_table.rows(summary, WORKDIR)).get("network bytes per step") == expected


def test_a_name_that_the_encoding_lacks_does_not_fail_the_run(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    summary_table.print_summary(ONE_DEVICE, pathlib.Path("läufe", "\udcff"))
    end = b"\nworkdir: l\\xe4ufe/\\udcff\ntensorboard --logdir 'l\\xe4ufe/\\udcff/tensorboard'\nthen open http://localhost:6006/#custom_scalars\n"
    assert written.getvalue().endswith(end)


def test_a_work_directory_steers_no_terminal(capsys):
    summary_table.print_summary(ONE_DEVICE, pathlib.Path("a\x1b[31m\n'b"))
    end = "workdir: a\\x1b[31m\\n'b\ntensorboard --logdir $'a\\x1b[31m\\n\\'b/tensorboard'\nthen open http://localhost:6006/#custom_scalars\n"
    assert capsys.readouterr().out.endswith(end)


def test_a_terminal_gets_a_table(tmp_path):
    workdir = tmp_path / "[b]" / ("long" * 10)
    program = (
        "import json, pathlib, sys; from tfdist.commands import summary_table; "
        "summary_table.print_summary(json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, json.dumps(ONE_DEVICE), str(workdir)]
    terminal = Terminal(command, tmp_path, {"PYTHONPATH": str(ROOT), "NO_COLOR": ""}, width=50)
    try:
        assert terminal.wait(60) == 0, terminal.output
    finally:
        terminal.close()
    assert "\x1b[1m" in terminal.output, "names are bold"
    table = [line for line in terminal.screen.lines if line.startswith("│")]
    assert {len(line) for line in table} == {50}
    cells, name = {}, ""
    for line in table:
        left, right = (cell.strip() for cell in line.strip("│").split("│"))
        name = left or name
        cells[name] = cells.get(name, "") + right.replace(" ", "")  # lines break at blanks, and in long words
    assert cells == {name: str(value).replace(" ", "") for name, value in summary_table.rows(ONE_DEVICE, workdir)}
    # One line, however narrow the terminal is: to be copied.
    assert f"\r\ntensorboard --logdir '{workdir}/tensorboard'\r\n" in terminal.output
