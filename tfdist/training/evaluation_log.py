"""What an evaluator has evaluated: `evaluations.jsonl`, and the curves in TensorBoard that are made of it."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.monitoring.event_files import BY_ITERATIONS, Run
from tfdist.monitoring.summary import finite_or_none
from tfdist.monitoring.tensorboard import is_number
from tfdist.runtime.log import logger

NAME = "evaluations.jsonl"


class EvaluationLog:
    """One line of JSON for each evaluation of one training, which outlives the process; and its curves.

    Args:
        workdir: The run's work directory.
        task: The name of the run in TensorBoard.

    Attributes:
        rows: The lines: `step`, `epoch`, `backup`, `training`, `time` and `metrics`.
    """

    def __init__(self, workdir: pathlib.Path, task: str):
        self._path = workdir / NAME
        self._run = Run(str(workdir / "tensorboard" / task))
        self._works = True
        self.rows = list(self._read())
        # Of the lines, as a process that was killed may have written one of both alone.
        self._try(lambda: self._run.cut({}))
        for row in self.rows:
            self._draw(row)

    def _read(self) -> Any:
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    yield json.loads(line)
                except ValueError:  # its writer was killed
                    pass

    def contains(self, training: str, step: int, backup: str = "") -> bool:
        """Returns whether a step of a training has been evaluated.

        Args:
            training: What its backups call it.
            step: The step.
            backup: Of which backup; empty means of any.
        """
        return any(
            (row["training"], row["step"]) == (training, step) and backup in ("", row["backup"]) for row in self.rows
        )

    def add(self, training: str, step: int, epoch: int, backup: str, metrics: dict[str, Any]) -> None:
        """Writes a line; the lines and curves of another training are set aside.

        Args:
            training: What its backups call it.
            step: The training's step.
            epoch: The epochs that had ended by then.
            backup: The name of the backup, or of the model's file.
            metrics: What `evaluate` has returned.
        """
        if any(row["training"] != training for row in self.rows):
            self._path.replace(self._path.with_name("evaluations.before.jsonl"))
            self._try(self._run.set_aside)
            self.rows = []
        metrics = {name: finite_or_none(value) for name, value in metrics.items()}
        row = {"step": step, "epoch": epoch, "metrics": metrics}
        row |= {"backup": backup, "training": training, "time": round(time.time(), 3)}
        torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("ab", buffering=0) as file:
            file.write((("\n" if torn else "") + json.dumps(row) + "\n").encode())
            os.fsync(file.fileno())
        self.rows.append(row)
        self._draw(row)

    def _draw(self, row: dict[str, Any]) -> None:
        metrics = {name: value for name, value in row["metrics"].items() if value is not None and is_number(value)}
        values = {BY_ITERATIONS.format(name=name): float(value) for name, value in metrics.items()}
        self._try(lambda: self._run.write(values, row["step"], row["time"]))
        self._try(self._run.flush)

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            if self._works:
                action()
        except (tf.errors.OpError, OSError) as e:
            self._works = False
            logger.warning(f"the evaluator writes no more curves, and goes on with {self._path} ({e}).")
