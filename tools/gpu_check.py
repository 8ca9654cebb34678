"""Checks tfdist on a machine with two GPUs, in about ten minutes, and prints one table in Markdown to paste into an issue.

    python -m tools.gpu_check                  # in a checkout of tfdist; exit code 0 if all verdicts are ok, 1 if not, 2 without two GPUs
    python -m tools.gpu_check --devices=cpu    # the same rows on two virtual CPUs

Each row is a run of `tfdist train` on the digits. Rows with two replicas train the same examples, so that their losses are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

from tfdist.doctor import checks

_RUN_SECONDS = 300
_DIFFERENCE = 0.02  # relative; sums in another order differ after 40 steps on a GPU
_HALF_DIFFERENCE = 0.1
_TRAINING = ("--config=digits", "--config.global_batch_size=64", "--config.epochs=2", "--config.steps_per_epoch=20")
_WORKERS = ("--config.strategy.name=multi_worker_mirrored", "--config.cluster.workers=2")
_KILLED = ("--config.max_restarts=1", "--config.backup.save_freq=10")
_ERROR = re.compile(r"^(?:\[[^\]]+\] )?([\w.]+Error: .*)$", re.MULTILINE)  # the last line of a traceback
_NOT_POSSIBLE = 2  # the exit code of a configuration that the machine cannot run


class Row(NamedTuple):
    """A run.

    Attributes:
        name: The first column.
        flags: Further flags of `tfdist train`.
        difference: The largest relative difference from the loss of the row `mirrored`; None if it is not compared.
        kill: A fault of `tools.chaos`; after it the run must have restarted once.
        on_cpus: Whether no GPU is visible, as the warm spare needs.
    """

    name: str
    flags: tuple[str, ...]
    difference: float | None = _DIFFERENCE
    kill: str = ""
    on_cpus: bool = False


def rows(two_devices: str) -> list[Row]:
    """Returns all rows; `two_devices` is the value of `strategy.devices` that gives one process two devices."""
    mirrored = ("--config.strategy.name=mirrored", f"--config.strategy.devices={two_devices}")
    kill = "kill:worker:1@25"
    return [
        Row("one device", (), difference=None),
        Row("mirrored", mirrored),
        Row("mirrored, nccl", (*mirrored, "--config.strategy.transport=nccl")),
        Row("mirrored, grpc", (*mirrored, "--config.strategy.transport=grpc")),
        Row("mirrored, mixed_float16", (*mirrored, "--config.precision=mixed_float16"), _HALF_DIFFERENCE),
        *(
            Row(f"two workers, {transport}", (*_WORKERS, f"--config.strategy.transport={transport}"))
            for transport in ("nccl", "grpc", "tcp", "shared_memory")
        ),
        Row("two workers, mixed_float16", (*_WORKERS, "--config.precision=mixed_float16"), _HALF_DIFFERENCE),
        Row("backups: a worker is killed", (*_WORKERS, *_KILLED, "--config.cluster.warm=0"), kill=kill),
        Row("spare: a worker is killed, on CPUs", (*_WORKERS, *_KILLED), kill=kill, on_cpus=True),
    ]


class Result(NamedTuple):
    """The result of a run: its verdict, and its `summary.json`, empty if the run has not finished."""

    verdict: str
    summary: Mapping

    @property
    def loss(self) -> float | None:
        return self.summary.get("metrics", {}).get("loss")


def run(row: Row, workdir: pathlib.Path, reference: float | None) -> Result:
    """Runs a row; `reference` is the loss that it is compared with."""
    command = [sys.executable, "-m", "tfdist.train", *_TRAINING, *row.flags, f"--workdir={workdir}"]
    if row.kill:
        command = [sys.executable, "-m", "tools.chaos", row.kill, "--", *command]
    environ = dict(os.environ)
    if row.on_cpus:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, errors="replace", timeout=_RUN_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Result(f"no end within {_RUN_SECONDS} s", {})
    if done.returncode:
        output = done.stdout + done.stderr
        messages = _ERROR.findall(output) or output.strip().splitlines() or ["no output"]
        begin = f"exit code {done.returncode}"
        if done.returncode == _NOT_POSSIBLE:
            begin = "not possible"
        return Result(f"{begin}: {messages[-1]}", {})
    summary = json.loads((workdir / "summary.json").read_text())
    result = Result("ok", summary)
    if row.kill and summary["restarts"] != 1:
        return result._replace(verdict=f"{summary['restarts']} restarts, and should be 1")
    if row.difference is not None and reference is not None:
        difference = abs(result.loss - reference) / abs(reference)
        if not difference <= row.difference:
            return result._replace(verdict=f"differs from mirrored by {100 * difference:.1f} %")
    return result


def table(results: Mapping[str, Result], machine: str) -> str:
    """Returns the table in Markdown, under a line that names the machine."""
    lines = [
        machine,
        "",
        "| run | verdict | loss | ms per step | gradients by | restarts |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        summary = result.summary
        loss = step = ""
        if result.loss is not None:
            loss = f"{result.loss:.4f}"
        if summary.get("step_ms"):
            step = f"{summary['step_ms']['median']:.1f}"
        verdict = result.verdict.replace("|", "/")
        lines.append(
            f"| {name} | {verdict} | {loss} | {step} | {summary.get('transport') or ''} | {summary.get('restarts', '')} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Runs all rows; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", choices=("gpu", "cpu"), default="gpu")
    chosen = parser.parse_args().devices
    found = [finding.value for finding in checks.devices(os.environ)]
    two_devices = "2"
    if chosen == "gpu":
        if not all(f"GPU:{number}" in found[0] for number in (0, 1)):
            print(f"TensorFlow sees fewer than two GPUs here ({', '.join(found)}): run this on a machine with two.")
            return 2
        two_devices = "GPU:0,GPU:1"
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows(two_devices)):
            print(f"{row.name} ...", file=sys.stderr, flush=True)
            reference = results["mirrored"].loss if "mirrored" in results else None
            results[row.name] = run(row, pathlib.Path(folder, str(number)), reference)
    versions = next((result.summary["versions"] for result in results.values() if result.summary), {})
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(table(results, f"{', '.join(found)}; {platform.processor() or platform.machine()}; {named}"))
    return int(any(result.verdict != "ok" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
