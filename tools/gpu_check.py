"""Checks tfdist on the GPUs of this machine, in about ten minutes, and prints one table in Markdown to paste into an issue.

    python -m tools.gpu_check                     # in a checkout of tfdist; exit code 0 if no verdict is a fault, else 1
    python -m tools.gpu_check --out=check.json    # keeps each row's result, and continues after an interruption

Each row is a run of `tfdist train`. Rows with two replicas train the same digits, so that their losses are compared. For the workers of a
row that needs more GPUs than there are, CPUs stand in: their tensors take the ways of GPUs, but for NCCL's kernels.
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
_COMPRESSORS = {"bf16": _HALF_DIFFERENCE, "int8": _HALF_DIFFERENCE, "topk": None, "powersgd": None}
_TRAINING = ("--config=digits", "--config.global_batch_size=64", "--config.epochs=2", "--config.steps_per_epoch=20")
_WORKERS = ("--config.strategy.name=multi_worker_mirrored", "--config.cluster.workers=2")
_KILLED = ("--config.max_restarts=1", "--config.backup.save_freq=10")
_ERROR = re.compile(r"^(?:\[[^\]]+\] )?([\w.]+Error: .*)$", re.MULTILINE)  # the last line of a traceback
_STOOD_IN = "ok, on CPUs"
_SKIPPED = "needs {} GPUs"
_NOT_POSSIBLE = 2  # the exit code of a configuration that the machine cannot run


class Row(NamedTuple):
    """A run.

    Attributes:
        name: The first column.
        flags: Further flags of `tfdist train`.
        difference: The largest relative difference from the loss of the row `mirrored`; None if it is not compared.
        kill: A fault of `tools.chaos`; after it the run must have restarted once.
        gpus: The number of GPUs that the row uses; 0 if none is visible, as the warm spare needs.
        only_gpus: Whether CPUs cannot stand in for them.
    """

    name: str
    flags: tuple[str, ...]
    difference: float | None = _DIFFERENCE
    kill: str = ""
    gpus: int = 2
    only_gpus: bool = False


def rows(gpus: int) -> list[Row]:
    """Returns all rows, for a machine with a number of GPUs."""
    mirrored = ("--config.strategy.name=mirrored", f"--config.strategy.devices={'GPU:0,GPU:1' if gpus > 1 else 2}")
    kill = "kill:worker:1@25"
    return [
        Row("one device", (), difference=None, gpus=1),
        Row("one device, mixed_float16", ("--config.precision=mixed_float16",), difference=None, gpus=1),
        Row("mirrored", mirrored),
        Row("mirrored, nccl", (*mirrored, "--config.strategy.transport=nccl"), only_gpus=True),
        Row("mirrored, grpc", (*mirrored, "--config.strategy.transport=grpc")),
        Row("mirrored, int8", (*mirrored, "--config.compression.name=int8"), _HALF_DIFFERENCE),
        Row("mirrored, mixed_float16", (*mirrored, "--config.precision=mixed_float16"), _HALF_DIFFERENCE),
        *(
            Row(f"two workers, {transport}", (*_WORKERS, f"--config.strategy.transport={transport}"))
            for transport in ("nccl", "grpc")
        ),
        *(
            Row(f"two workers, {name}", (*_WORKERS, f"--config.compression.name={name}"), difference)
            for name, difference in _COMPRESSORS.items()
        ),
        Row("two workers, mixed_float16", (*_WORKERS, "--config.precision=mixed_float16"), _HALF_DIFFERENCE),
        Row("two workers, split optimizer", (*_WORKERS, "--config.strategy.shard_optimizer=True")),
        Row("two workers, local steps", (*_WORKERS, "--config.strategy.sync_every=5"), difference=None),
        Row("two workers, tables", ("--config=ratings", *_WORKERS), difference=None),
        Row("backups: a worker is killed", (*_WORKERS, *_KILLED, "--config.cluster.warm=0"), kill=kill),
        Row("spare: a worker is killed, on CPUs", (*_WORKERS, *_KILLED), kill=kill, gpus=0),
    ]


class Result(NamedTuple):
    """The result of a run: its verdict, and its `summary.json`, empty if the run has not finished."""

    verdict: str
    summary: Mapping

    @property
    def loss(self) -> float | None:
        return self.summary.get("metrics", {}).get("loss")


def run(row: Row, workdir: pathlib.Path, gpus: int, reference: float | None) -> Result:
    """Runs a row on a machine with `gpus` GPUs; `reference` is the loss that it is compared with."""
    if row.only_gpus and gpus < row.gpus:
        return Result(_SKIPPED.format(row.gpus), {})
    command = [sys.executable, "-m", "tfdist.train", *_TRAINING, *row.flags, f"--workdir={workdir}"]
    if row.kill:
        command = [sys.executable, "-m", "tools.chaos", row.kill, "--", *command]
    environ = dict(os.environ)
    if gpus < row.gpus or not row.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    if gpus < row.gpus:
        environ["TFDIST_CPUS_AS_GPUS"] = "1"
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
    result = Result(_STOOD_IN if gpus < row.gpus else "ok", summary)
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
    """Runs all rows that have no result yet; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file of the results, by which the next call continues")
    out = parser.parse_args().out
    found = [finding.value for finding in checks.devices(os.environ)]
    gpus = found[0].count("GPU:")
    results: dict[str, Result] = {}
    if out and out.exists():
        results = {name: Result(**result) for name, result in json.loads(out.read_text()).items()}
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows(gpus)):
            if row.name in results:
                continue
            print(f"{row.name} ...", file=sys.stderr, flush=True)
            reference = results["mirrored"].loss if "mirrored" in results else None
            results[row.name] = run(row, pathlib.Path(folder, str(number)), gpus, reference)
            if out:
                out.write_text(json.dumps({name: result._asdict() for name, result in results.items()}, indent=1))
    versions = next((result.summary["versions"] for result in results.values() if result.summary), {})
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(table(results, f"{', '.join(found)}; {platform.processor() or platform.machine()}; {named}"))
    return int(any(not result.verdict.startswith(("ok", "needs")) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
