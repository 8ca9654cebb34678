"""Folders that a run writes to: whether it can, and their free room. No TensorFlow here."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping

from tfdist.doctor.report import ERROR, NOTE, OK, WARNING, Finding, format_bytes, shorten
from tfdist.runtime.files import write_error_reason

_LEAST_TEMPORARY, _LEAST_WORKDIR, _LEAST_SHARED = 100 * 2**20, 2**30, 128 * 2**20  # bytes


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings about the current folder, that of temporary files and shared memory."""
    try:
        yield _writable("current folder", os.getcwd(), _LEAST_WORKDIR, "give --workdir a folder elsewhere")
    except OSError:
        yield Finding(ERROR, "current folder", "does not exist any more", "cd to a folder that exists")
    elsewhere = "free the disk, or set TMPDIR to a folder that can be written"
    named = environ.get("TMPDIR")
    if named:
        yield _writable("TMPDIR", named, _LEAST_TEMPORARY, elsewhere)
    if not named or cannot_write(named):
        tried = [environ.get("TEMP"), environ.get("TMP"), "/tmp", "/var/tmp", "/usr/tmp"]  # as Python's tempfile
        folders = [each for each in tried if each]
        if usable := next((each for each in folders if not cannot_write(each)), None):
            yield _writable("temporary files", usable, _LEAST_TEMPORARY, elsewhere)
        else:
            shown = f"none of {', '.join(map(shorten, folders))} can be written"
            yield Finding(ERROR, "temporary files", shown, elsewhere)
    if os.path.isdir("/dev/shm"):
        remedy = "docker run --shm-size=1g: NCCL exchanges gradients there"
        yield _writable("shared memory", "/dev/shm", _LEAST_SHARED, remedy)
    else:
        yield Finding(NOTE, "/dev/shm", "not there", "NCCL needs it for several GPUs: mount a tmpfs there")


def _writable(what: str, folder: str, least: int, remedy: str) -> Finding:
    if why := cannot_write(folder):
        return Finding(WARNING, what, f"{shorten(folder)} cannot be written: {why}", remedy)
    free = shutil.disk_usage(folder).free
    value = f"{shorten(folder)}, {format_bytes(free)} free"
    return Finding(OK, what, value) if free >= least else Finding(WARNING, what, value, remedy)


def cannot_write(folder: str) -> str:
    """Returns why no file can be written in a folder, or an empty text. Leaves none."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as e:
        return write_error_reason(e)
    except ValueError:  # a null byte
        return "no name of a folder"
    return ""
