"""Runs a schedule, and judges how its job ended: in the bits of an undisturbed job, or in a sentence within its limit."""

from __future__ import annotations

import contextlib
import pathlib
import re
import shutil
import time
from typing import Any

import numpy as np

from tests.chaos.job import RESTARTS, Job, small_disk, until
from tests.chaos.schedules import FOLDERS, KINDS, LAUNCHER, Schedule
from tests.helpers import two_hosts

STEPS = 30
# How long a task that does not answer is waited for (docs/hangs.md), beside the start_timeout of the program.
_SILENCE = {KINDS[0]: 60.0, KINDS[1]: 40.0}
_START_TIMEOUT = 40.0
_SPARE = 30.0
# The launcher's last word on a task, and a reason that is a sentence of ours: no traceback of TensorFlow's.
_SENTENCE = re.compile(
    r"^tfdist: (?:chief|worker|ps):\d (?:was killed by SIG\w+(?:; all \d+ restarts are spent; .*)?|failed with exit code \d+: "
    r"(?:(?:Cluster|Backup|Config)Error: |(?!\w+(?:Error|Exception)\b)).*)$",
    re.MULTILINE,
)
_TOLD = re.compile(r"^tfdist: .*$", re.MULTILINE)
# TensorFlow's own files, which a process that is killed leaves.
_TENSORFLOWS = "__autograph_generated_file"

Weights = dict[str, np.ndarray]
References = dict[tuple[str, bool], tuple[Weights, float]]


def run(schedule: Schedule, folder: pathlib.Path, references: References) -> dict[str, Any]:
    """Returns how the job of a schedule ended; `wrong` is what should not be.

    Args:
        schedule: What happens to it.
        folder: An empty folder.
        references: What undisturbed jobs have trained, in which seconds; filled here.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(two_hosts.joined()) if schedule.has_link else []
        key = (schedule.kind, schedule.has_link)  # the number of a task's cores may change the last bits
        if key not in references:
            references[key] = _reference(Job(schedule.kind, folder / "reference", hosts))
        for name in {fault.victim for fault in schedule.faults} & set(FOLDERS):
            stack.enter_context(small_disk(folder / "job" / name))
        job = Job(schedule.kind, folder / "job", hosts)
        stack.callback(job.end)
        result = _run(schedule, job, *references[key])
        if result["wrong"]:
            result["output"] = job.output()[-3000:]
    return {"seed": schedule.seed, "seconds": round(time.monotonic() - began, 1), "schedule": str(schedule), **result}


def limit(schedule: Schedule, undisturbed: float) -> float:
    """Returns within how many seconds a job must end: lives, and waits whose length is documented; three times as a machine may be busy."""
    faults = schedule.faults
    waits = _SILENCE[schedule.kind] + _START_TIMEOUT + sum(fault.seconds for fault in faults)
    return 3 * undisturbed * (1 + len(faults)) + waits + RESTARTS * 4.0 + _SPARE


def _reference(job: Job) -> tuple[Weights, float]:
    try:
        code, seconds = job.run((), 240)
        assert code == 0, job.output()
        found = _result(job)
        assert found is not None and found["steps"] == STEPS
        left = _left(job, 0)
        assert not left, left
        return found, seconds
    finally:
        job.end()
        shutil.rmtree(job.folder)


def _run(schedule: Schedule, job: Job, expected: Weights, undisturbed: float) -> dict[str, Any]:
    allowed = limit(schedule, undisturbed)
    code, took = job.run(schedule.faults, allowed)
    launcher_killed = any(fault.victim == LAUNCHER and fault.what == "kill" for fault in job.happened)
    output = job.output()
    found: dict[str, Any] = {"end": "", "code": code, "took": round(took, 1), "limit": round(allowed), "wrong": []}
    found["told"] = [line[:300] for line in _TOLD.findall(output) if " lost " in line or "ending all" in line]
    wrong = found["wrong"]
    if missed := [fault for fault in schedule.faults if fault not in job.happened]:
        found["missed"] = [f"{fault.what} at {fault.phase}" for fault in missed]
    if len(missed) == len(schedule.faults):
        wrong.append("nothing happened")
    if code is None:
        wrong.append(f"it has not ended within {allowed:.0f} s")
        return found
    if code == 0:
        found["end"] = "bits" if schedule.kind == KINDS[0] else "steps"
        wrong += _differences(schedule.kind, _result(job), expected)
    elif launcher_killed and code == -9:
        found["end"] = "sentence"
        found["sentence"] = "(the launcher was killed)"
    else:
        found["end"] = "sentence"
        sentences = _SENTENCE.findall(output)
        found["sentence"] = sentences[-1][:600] if sentences else ""
        if not sentences:
            wrong.append(f"it has ended with exit code {code}, and no sentence")
    wrong += _left(job, code)
    if code != 0:  # nothing of what it has learnt may be lost
        job.end()
        again, seconds = job.run((), allowed)
        found["again"] = round(seconds, 1)
        if again != 0:
            wrong.append(f"run again, undisturbed, it ends with {again}")
        else:
            wrong += [f"run again: {each}" for each in _differences(schedule.kind, _result(job), expected)]
            wrong += [f"run again: {each}" for each in _left(job, code)]
    return found


def _result(job: Job) -> Weights | None:
    path = job.folder / "out" / "result.npz"
    if not path.exists():
        return None
    with np.load(path) as found:
        return dict(found)


def _differences(kind: str, found: Weights | None, expected: Weights) -> list[str]:
    if found is None:
        return ["it has ended well, and saved nothing"]
    if found["steps"] != STEPS:
        return [f"it has made {found['steps']} steps, not {STEPS}"]
    if infinite := [name for name, values in found.items() if not np.isfinite(values.astype("float64")).all()]:
        return [f"{infinite} are not finite"]
    if kind == KINDS[1]:  # steps in no order
        return []
    assert found.keys() == expected.keys()
    other = [name for name, values in found.items() if values.tobytes() != expected[name].tobytes()]
    return [f"{len(other)} of {len(found)} variables are not bit for bit those of an undisturbed job"] if other else []


def _left(job: Job, code: int) -> list[str]:
    """Returns what a job has left, a sentence each."""
    found = []
    if not until(lambda: not job.alive(), 15):  # the guardian ends after the launcher
        found.append(f"processes are left: {job.alive()}")
    # A process that ends has no environment any more before it has closed its sockets.
    if not job.hosts and not until(lambda: not job.taken_ports(), 15):
        found.append(f"ports are taken: {job.taken_ports()}")
    killed = code == -9  # the launcher has removed nothing
    files = [path.name for path in (job.folder / "tmp").iterdir() if not path.name.startswith(_TENSORFLOWS)]
    if files and not killed:
        found.append(f"the temporary folder has {files}")
    if code == 0:
        kept = {"output", "out", "phases", *FOLDERS}
        own = sorted(path.name for path in job.folder.iterdir() if path.name not in kept)
        own += [
            f"out/{path.name}"
            for path in (job.folder / "out").iterdir()
            if path.name not in ("result.npz", "model.keras")
        ]
        own += [f"backup/{path.name}" for path in (job.folder / "backup").glob("*")]
        if own:
            found.append(f"it has left {own}")
    return found
