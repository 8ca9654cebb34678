"""Python programs that must not load TensorFlow, each in a fork of one interpreter: 0.1 s in place of a start."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
TENSORFLOW = {"tensorflow", "keras", "tf_keras", "tensorboard"}
# The interpreter has imported what commands use of other packages, and nothing of tfdist.
_RUN_ALL = """
import json, os, runpy, sys
import absl.flags, importlib.metadata, psutil, rich.console, rich.live, rich.table, yaml
commands, results = json.load(sys.stdin), []
for arguments, environ in commands:
    files = [os.memfd_create(name) for name in ("stdout", "stderr")]
    if (child := os.fork()) == 0:
        os.dup2(files[0], 1), os.dup2(files[1], 2), os.environ.update(environ)
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    results.append([code, *(os.pread(file, 1 << 20, 0).decode() for file in files)])
    os.close(files[0]), os.close(files[1])
else:
    print(json.dumps(results))
    os._exit(sys.stdout.flush() or 0)
how, what, *sys.argv[1:] = arguments
if how == "-c":
    exec(what, {"__name__": "__main__"})
else:
    runpy.run_module(what, run_name="__main__", alter_sys=True)
"""


class Done(NamedTuple):
    """How a command has ended."""

    returncode: int
    stdout: str
    stderr: str


def run_all(
    commands: Iterable[tuple[list[str], dict[str, str]]], folder: pathlib.Path, poison: pathlib.Path
) -> list[Done]:
    """Runs commands one after the other; what loads TensorFlow or Keras ends at once, with code 99.

    Args:
        commands: The arguments of Python (`-m` or `-c` first) and environment variables of each.
        folder: Their current folder.
        poison: A folder for packages that end the process that imports them.
    """
    for name in TENSORFLOW:
        (poison / name).mkdir(exist_ok=True)
        (poison / name / "__init__.py").write_text("import os\nos._exit(99)\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "TF_"))}
    environ = {**kept, "PYTHONPATH": f"{poison}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN_ALL],
        cwd=folder,
        env=environ,
        input=json.dumps(list(commands)),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return [Done(*result) for result in json.loads(done.stdout)]
