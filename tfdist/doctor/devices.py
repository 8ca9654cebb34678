"""The check of TensorFlow's devices, in a separate process, because a broken driver can block or kill it; and of the system's GPUs."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.doctor.report import ERROR, NOTE, OK, WARNING, Finding, printable, shorten
from tfdist.errors import truncate
from tfdist.runtime import tensorflow_log

_LIMIT = 60.0  # seconds for TensorFlow to load and look
DRIVER = pathlib.Path("/proc/driver/nvidia/gpus")  # a folder for each GPU
_PIPES: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
_MARK = "tfdist-devices "
_LOOK = f"""
import json
import tensorflow as tf
devices = [(d.name.removeprefix("/physical_device:"), tf.config.experimental.get_device_details(d).get("device_name", ""))
    for d in tf.config.list_physical_devices() if d.device_type != "XLA_CPU"]
print("\\n{_MARK}" + json.dumps(devices), flush=True)
"""


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding with TensorFlow's devices, or with the reason why TensorFlow cannot be loaded."""
    quiet = {tensorflow_log.LEVEL: tensorflow_log.ERRORS_ONLY, **environ}
    code, output, errors = run([sys.executable, "-c", _LOOK], quiet, _LIMIT)
    answer = next((line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)), None)
    if answer is None:
        if code is None:
            why = f"gave no answer within {_LIMIT:.0f} s"
        else:
            last_line = ["no message", *(line.strip() for line in errors.splitlines() if line.strip())][-1]
            ending = f"signal {-code}" if code < 0 else f"exit code {code}"
            why = f"ended with {ending}: {truncate(printable(last_line))}"
        remedy = "look at the driver, or set CUDA_VISIBLE_DEVICES= to train without GPUs"
        yield Finding(ERROR, "devices", f"TensorFlow {why}", f"run python -c 'import tensorflow'; {remedy}")
        return
    devices = json.loads(answer)
    names = [f"{name} ({kind})" if kind else name for name, kind in devices]
    yield Finding(OK, "devices", printable(", ".join(names)))
    sees_none = not any(name.startswith("GPU") for name, _ in devices)
    present = gpus(environ) if sees_none and "CUDA_VISIBLE_DEVICES" not in environ else 0
    if present:
        remedy = "pip install 'tensorflow[and-cuda]'; see nvidia-smi"
        yield Finding(WARNING, "GPUs", f"the driver has {present}, but TensorFlow sees no GPU", remedy)


def visible(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding about CUDA_VISIBLE_DEVICES, if it is set."""
    name = "CUDA_VISIBLE_DEVICES"
    if name not in environ:
        return
    chosen = shorten(environ[name])
    present = gpus(environ)
    named = [device.strip() for device in environ[name].split(",") if device.strip()]
    hides_all = not named or named[0] == "-1"
    if hides_all and present:
        yield Finding(WARNING, name, chosen, f"unset it to train on GPUs: this machine has {present}")
    elif hides_all:
        yield Finding(NOTE, name, chosen, "unset it to train on GPUs")
    elif not present:
        remedy = "unset it, or look at the driver: nvidia-smi"
        yield Finding(NOTE, name, f"{chosen}, but there is no NVIDIA driver", remedy)
    elif any(device.isdecimal() and int(device[:9]) >= present for device in named):
        remedy = "correct it: CUDA leaves out a device that does not exist, and all after it"
        yield Finding(WARNING, name, f"{chosen}; this machine has 0 to {present - 1}", remedy)
    elif len({*named}) < len(named):
        yield Finding(WARNING, name, chosen, "name each device once: CUDA then shows none")
    else:
        yield Finding(OK, name, chosen)


def gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of GPUs of NVIDIA's driver, including those that this process does not see."""
    try:
        return len(list(DRIVER.iterdir()))
    except OSError:
        output = run(["nvidia-smi", "-L"], environ, 10.0)[1]
        return sum(line.startswith("GPU ") for line in output.splitlines())


def run(command: list[str], environ: Mapping[str, str], limit: float) -> tuple[int | None, str, str]:
    """Runs a command; returns its exit code, or None if it did not start or end within `limit` seconds, and both its outputs."""
    try:
        done = subprocess.run(command, env=dict(environ), timeout=limit, **_PIPES)
    # If a driver blocks the process for longer, the limit of the check applies.
    except (OSError, subprocess.TimeoutExpired):
        return None, "", ""
    return done.returncode, done.stdout, done.stderr
