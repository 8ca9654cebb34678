"""The end of a run in a terminal, in a pipe and in a file."""

import fcntl
import io
import json
import os
import pathlib
import pty
import struct
import subprocess
import sys
import termios

import pytest

from tfdist.monitoring import summary_table

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
    "step_ms": {"median": None, "p95": None},
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
    "step_ms": {"median": 24.06, "p95": 30.766},
    "compression": {"name": "powersgd", "matrix_approximation_rank": 4},
    "wire_bytes_per_step": {
        "predicted": 9000,
        "measured": 9100,
        "before_compression": {"predicted": 80000, "measured": None},
    },
    "restarts": 1,
}
SERVERS = {
    **ONE_DEVICE,
    "strategy": "parameter_server",
    "num_replicas": 3,
    "metrics": {},
    "retried_steps": 2,
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
            batch: 64
            loss: 0.123457
            val_f1: [0.5, not finite]
            val_loss: not finite
            restarts: 0
            wall time s: 5.66
            of it steps s: 2.83
            of it startup s: 2.83
            workdir: runs/demo""",
        ),
        (
            WORKERS,
            """task: digits
            strategy: multi_worker_mirrored
            replicas: 2
            batch: 64
            val_accuracy: 0.975
            examples/s: 2660.0
            step median ms: 24.06
            step p95 ms: 30.766
            compression: powersgd
            bytes per step predicted: 9000
            bytes per step measured: 9100
            bytes per step before compression predicted: 80000
            restarts: 1
            wall time s: 5.66
            of it steps s: 2.83
            of it startup s: 2.83
            workdir: runs/demo""",
        ),
        (
            SERVERS,
            """task: digits
            strategy: parameter_server
            workers: 3
            batch per worker: 64
            retried steps: 2
            restarts: 0
            wall time s: 5.66
            of it steps s: 2.83
            of it startup s: 2.83
            workdir: runs/demo""",
        ),
    ],
    ids=lambda value: value["strategy"] if isinstance(value, dict) else "",
)
def test_rows_are_what_was_measured(summary, expected, capsys):
    lines = [line.strip() for line in expected.splitlines()]
    assert [f"{name}: {value}" for name, value in summary_table.rows(summary, WORKDIR)] == lines
    summary_table.print_summary(summary, WORKDIR)
    assert capsys.readouterr().out.splitlines() == lines


def test_a_name_that_the_encoding_lacks_does_not_fail_the_run(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    summary_table.print_summary(ONE_DEVICE, pathlib.Path("läufe", "\udcff"))
    assert written.getvalue().endswith(b"\nworkdir: l\\xe4ufe/\\udcff\n")


def in_terminal(columns, *arguments, **environ):
    """Returns what `python -m tfdist.train` prints in a terminal of so many columns, and its exit code."""
    terminal, stdout = pty.openpty()
    fcntl.ioctl(stdout, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [sys.executable, "-m", "tfdist.train", *arguments]
    kept = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "NO_COLOR", "COLUMNS")}
    environ = {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **environ}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=stdout, stderr=subprocess.DEVNULL) as process:
        os.close(stdout)
        found = b""
        while True:
            try:
                found += os.read(terminal, 2**16)
            except OSError:  # Linux' end of a pseudo-terminal
                break
        os.close(terminal)
    return found.decode(), process.returncode


def test_a_terminal_gets_a_table(tmp_path):
    workdir = tmp_path / "[b]" / ("long" * 10)
    options = ["--config=configs/default.py", "--config.epochs=1", "--config.steps_per_epoch=3"]
    output, code = in_terminal(50, *options, f"--workdir={workdir}")
    assert code == 0, output
    plain = output.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert plain != output, "names are bold"
    table = [line for line in plain.splitlines() if line.startswith("│")]
    assert {len(line) for line in table} == {50}
    cells, name = {}, ""
    for line in table:
        left, right = (cell.strip() for cell in line.strip("│").split("│"))
        name = left or name
        cells[name] = cells.get(name, "") + right
    summary = json.loads((workdir / "summary.json").read_text())
    assert cells == {
        "task": "digits",
        "strategy": "one_device",
        "replicas": "1",
        "batch": "64",
        **{name: f"{value:.6g}" for name, value in summary["metrics"].items()},
        "examples/s": str(summary["examples_per_second"]),
        "step median ms": str(summary["step_ms"]["median"]),
        "step p95 ms": str(summary["step_ms"]["p95"]),
        "restarts": "0",
        "wall time s": str(summary["goodput"]["wall_seconds"]),
        **{
            f"of it {part.replace('_', ' ')} s": str(took)
            for part, took in summary["goodput"]["seconds"].items()
            if took
        },
        "workdir": str(workdir),
    }
    assert "val_accuracy" in cells and '"metrics"' not in output
