"""A disk of a few bytes: a file system of its own, which needs root."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def mounted(folder: pathlib.Path, size: int) -> Iterator[None]:
    """Makes an empty disk of `size` bytes of a folder; skips the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounts are not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
