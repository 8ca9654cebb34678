"""`TaskActor`: the part of a job on a Ray node, which runs one task at a time as its own process. No TensorFlow here."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import ray

from tfdist.cluster.local import free_ports
from tfdist.launch.failure import out_of_memory_kills
from tfdist.launch.guardian import Guardian
from tfdist.launch.process import Process
from tfdist.launch.warm import WarmSpare
from tfdist.ray import task
from tfdist.runtime.folders.temporary import temporary_folder
from tfdist.runtime.report import progress

_TURN = 0.1  # seconds between two looks at the task's records
_CHUNK = 1 << 16
# Seconds to read what a task has written before its end: processes that it has started may keep its pipe open.
_DRAIN_SECONDS = 1.0


class Event(NamedTuple):
    """News of a task since the last event.

    Attributes:
        output: New output.
        files: The task's records, if they have changed (`progress.records`).
        exit_code: The exit code, or minus the number of the signal that ended the task; None while it runs.
        outcome: What the program of `tfdist.ray.run` has written at its end: the pickled return value of worker 0, or a traceback.
        is_out_of_memory: Whether the system has killed a process of its node meanwhile, because memory was exhausted.
    """

    output: bytes
    files: Mapping[str, bytes]
    exit_code: int | None = None
    outcome: bytes = b""
    is_out_of_memory: bool = False


class TaskActor:
    """Actor that starts a task on its node, reports its output and its records, and ends it.

    The task is a process in its own session. A guardian kills it if the actor dies, as it does on the launcher's machine.

    Args:
        command: The command of the tasks. An empty first word means the Python that runs this actor.
        variables: Variables of the task's environment that differ from the node's.
        folder: The working directory, if the node has it. Otherwise the tasks run in that of the actor.
        warm: Whether to fork tasks from a process that has imported TensorFlow.
        function: The function for the program of `tfdist.ray.run`, pickled; empty for other commands.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], folder: str, warm: bool, function: bytes):
        if os.path.isdir(folder):
            os.chdir(folder)
        self._command = [command[0] or sys.executable, *command[1:]]
        stack = self._stack = contextlib.ExitStack()  # an actor is killed, and its guardian removes the folder
        self._folder = stack.enter_context(temporary_folder())
        pathlib.Path(self._folder, task.FUNCTION).write_bytes(function)
        self._outcome = pathlib.Path(self._folder, task.OUTCOME)
        self._guardian = stack.enter_context(Guardian(self._folder, is_child=False))
        # So that a function that uses Ray connects to this cluster, and starts no other one.
        self._added = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address} if function else {}
        spared = self._command if warm else ()
        self._spare = stack.enter_context(WarmSpare(spared, self._environ(variables), self._guardian))
        self._process: Process | None = None
        self._is_ending = False

    def address(self) -> str:
        """Returns the address for the next task, on a free port, once it can start."""
        self._spare.wait(lambda: False)
        return f"{ray.util.get_node_ip_address()}:{free_ports(1)[0]}"

    def signal(self, number: int) -> None:
        """Sends a signal to the task and all processes that it has started."""
        self._is_ending = True
        self._kill(number)

    def run(self, variables: Mapping[str, str], files: Mapping[str, bytes]) -> Iterator[Event]:
        """Starts a task, and yields its events until it has ended.

        Args:
            variables: As for the class, for this task.
            files: The records that the task finds (`progress.records`).
        """
        progress.clear(self._folder, 0)
        progress.store(self._folder, files)
        self._outcome.write_bytes(b"")
        reader, writer = os.pipe()
        self._is_ending = False
        killed_before = out_of_memory_kills()
        try:
            # If this actor is killed before it knows the process, the guardian looks for it.
            with self._guardian.starting():
                process = self._spare.start(self._command, self._environ(variables), writer)
                self._guardian.watch(process.pid)
        except OSError as e:
            yield Event(f"tfdist: cannot start {self._command[0]}: {e.strerror}\n".encode(), {}, 127)
            return
        finally:
            os.close(writer)
        self._process = process
        before = dict(files)
        with open(reader, "rb", buffering=0) as pipe:
            while not self._is_over(process):
                event = Event(_read(reader, _TURN), _changed(self._folder, before))
                if event.output or event.files:
                    yield event
                elif select.select([reader], [], [], 0)[0]:  # its output has ended, but not the task
                    time.sleep(_TURN)
            self._kill(signal.SIGKILL)
            process.wait()
            self._process = None
            self._guardian.unwatch(process.pid)
            until = time.monotonic() + _DRAIN_SECONDS
            output = b""
            while time.monotonic() < until:
                chunk = _read(pipe.fileno(), until - time.monotonic())
                output += chunk
                if not chunk:
                    break
            is_out_of_memory = out_of_memory_kills() > killed_before
            outcome = self._outcome.read_bytes()
            yield Event(output, _changed(self._folder, before), process.returncode, outcome, is_out_of_memory)

    def _environ(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {**os.environ, **variables, **self._added, progress.FOLDER: self._folder}

    def _is_over(self, process: Process) -> bool:
        # A shell dies of a signal at once; the processes that it runs have the full grace period.
        return process.poll() is not None and not (self._is_ending and self._kill(0))

    def _kill(self, number: int) -> bool:
        """Sends a signal to the task's group; returns whether any of its processes existed."""
        if self._process is None:
            return False
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


def _read(descriptor: int, seconds: float) -> bytes:
    """Returns output that is there within some seconds; empty at its end."""
    if not select.select([descriptor], [], [], seconds)[0]:
        return b""
    return os.read(descriptor, _CHUNK)


def _changed(folder: str, before: dict[str, bytes]) -> Mapping[str, bytes]:
    """Returns the records that differ from `before`, and notes them there. An empty record was removed."""
    now = progress.records(folder)
    changed = {name: content for name, content in now.items() if before.get(name) != content}
    changed |= {name: b"" for name in before if name not in now and before[name]}
    before.update(changed)
    return changed
