"""Devices that TensorFlow finds, in a process of its own, as a broken driver can hang or kill it; and GPUs that the system has.

No TensorFlow in this process.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping

from tfdist.doctor.report import ERROR, NOTE, OK, WARNING, Finding, printable, shorten
from tfdist.errors import truncate
from tfdist.runtime import tensorflow_log

_LIMIT = 60.0  # seconds for TensorFlow to load and look
_DRIVER_LIMIT = 10.0
_DRIVER = pathlib.Path("/proc/driver/nvidia/gpus")  # a folder for each GPU
_MARK = "tfdist-devices "
_LOOK = f"""
import json
import tensorflow as tf
found = [(each.name.removeprefix("/physical_device:"), tf.config.experimental.get_device_details(each).get("device_name", ""))
    for each in tf.config.list_physical_devices() if each.device_type != "XLA_CPU"]
print("\\n{_MARK}" + json.dumps(found), flush=True)
"""


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields which devices TensorFlow finds, or why it cannot be loaded."""
    code, output, errors = run(
        [sys.executable, "-c", _LOOK], {tensorflow_log.LEVEL: tensorflow_log.ERRORS_ONLY, **environ}, _LIMIT
    )
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    if not lines:
        last_line = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "nothing is said")
        why = (
            f"gave no answer within {_LIMIT:.0f} s"
            if code is None
            else f"ended with {_ending(code)}: {truncate(printable(last_line))}"
        )
        remedy = (
            "run python -c 'import tensorflow'; look at the driver, or set CUDA_VISIBLE_DEVICES= to train without GPUs"
        )
        yield Finding(ERROR, "devices", f"TensorFlow {why}", remedy)
        return
    found = json.loads(lines[-1].removeprefix(_MARK))
    names = [f"{name} ({kind})" if kind else name for name, kind in found]
    yield Finding(OK, "devices", printable(", ".join(names)))
    present = gpus(environ)
    if present and environ.get("CUDA_VISIBLE_DEVICES") is None and not any(name.startswith("GPU") for name, _ in found):
        yield Finding(
            WARNING,
            "GPUs",
            f"the driver has {present}, and TensorFlow sees none",
            "pip install 'tensorflow[and-cuda]'; see nvidia-smi",
        )


def visible(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields what CUDA_VISIBLE_DEVICES leaves of the GPUs."""
    name = "CUDA_VISIBLE_DEVICES"
    if (chosen := environ.get(name)) is None:
        return
    present = gpus(environ)
    named = [each.strip() for each in chosen.split(",") if each.strip()]
    if not named or named[0] == "-1":
        level = WARNING if present else NOTE
        yield Finding(
            level,
            name,
            shorten(chosen),
            f"unset it to train on GPUs{f': this machine has {present}' if present else ''}",
        )
        return
    unknown = [each for each in named if each.isdecimal() and int(each[:9]) >= present]
    if not present:
        yield Finding(
            NOTE,
            name,
            f"{shorten(chosen)}, and no NVIDIA driver is found",
            "unset it, or look at the driver: nvidia-smi",
        )
    elif unknown:
        yield Finding(
            WARNING,
            name,
            f"{shorten(chosen)}; this machine has 0 to {present - 1}",
            "correct it: CUDA leaves out a device that does not exist, and all after it",
        )
    elif len({*named}) < len(named):
        yield Finding(WARNING, name, shorten(chosen), "name each device once: CUDA then shows none")
    else:
        yield Finding(OK, name, shorten(chosen))


def gpus(environ: Mapping[str, str]) -> int:
    """Returns how many GPUs NVIDIA's driver has, whatever this process may see of them."""
    with contextlib.suppress(OSError):
        return len(list(_DRIVER.iterdir()))
    with contextlib.suppress(OSError):  # there is no such program
        _, output, _ = run(["nvidia-smi", "-L"], environ, _DRIVER_LIMIT)
        return sum(line.startswith("GPU ") for line in output.splitlines())
    return 0


def run(command: list[str], environ: Mapping[str, str], limit: float) -> tuple[int | None, str, str]:
    """Runs a command; returns its exit code, or None where it was ended after `limit` seconds, and both its outputs.

    Raises:
        OSError: It cannot be started.
    """
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        output, errors = process.communicate(timeout=limit)
        return process.returncode, output, errors
    except subprocess.TimeoutExpired:
        return None, "", ""
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds cannot be ended
            process.wait(timeout=1)
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
