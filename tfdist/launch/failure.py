"""`Failure`: why a task has failed, by its record and its exit status, and what to do. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import pathlib
import signal

from tfdist.cluster import TaskSpec
from tfdist.runtime.end import process_end
from tfdist.runtime.files import read_file
from tfdist.runtime.report import progress, stacks
from tfdist.runtime.report.ending import Kind

# The files in which the kernel counts, of the second and the first version of cgroups, by the controllers of a group.
_KILL_COUNTERS = {"": "/sys/fs/cgroup{}/memory.events", "memory": "/sys/fs/cgroup/memory{}/memory.oom_control"}
_BY_EXIT_CODE = {process_end.FAULTY_CONFIG: Kind.CONFIG, process_end.PREEMPTED: Kind.PREEMPTED}


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure of a task.

    Attributes:
        task: The task that failed.
        exit_code: The task's exit code, or minus the number of the signal that ended it.
        kind: The kind of its end.
        error: The error in one line; for exit code 0, the step; after a fatal signal, the line of the program. An empty text if unknown.
        last_line: The last line of its output, for a task that has not told its end.
        loss: The task's report that it ended because it had lost another task, or None.
    """

    task: TaskSpec
    exit_code: int
    kind: Kind = Kind.ERROR
    error: str = ""
    last_line: str = ""
    loss: progress.Loss | None = None

    @property
    def is_killed(self) -> bool:
        """Whether a signal has ended the task."""
        return self.exit_code < 0

    @property
    def lost(self) -> str:
        """The task that was lost: the one that failed, or the one that it had lost."""
        return self.loss.task if self.loss else str(self.task)

    @property
    def cause(self) -> str:
        """How the task ended: `killed by SIGKILL`, or `exit code 1: ValueError: ...`."""
        if self.loss:
            return str(self.loss)
        if self.is_killed:
            cause = ", because memory was exhausted" if self.kind is Kind.MEMORY else ""
            place = f" at {self.error}" if self.error else ""
            return f"killed by {signal_name(-self.exit_code)}{cause}" + place
        if not self.exit_code:
            reached = f" ({self.error})" if self.error else ""
            return "exit code 0 before the training has finished" + reached
        error = f": {self.error}" if self.error else ""
        if self.last_line and not self.error and self.kind is not Kind.PREEMPTED:
            error = f", last line: {self.last_line}"
        return f"exit code {self.exit_code}" + error

    @property
    def status(self) -> int:
        """The exit code that a shell would show."""
        if self.is_killed:
            return 128 - self.exit_code
        if self.kind is Kind.CONFIG:
            return process_end.FAULTY_CONFIG
        return self.exit_code or 1  # exit code 0 before the end of the training is a failure, too

    def remedy(self, saved: int | None) -> str:
        """Returns how to continue after a process was killed, lost or left its `fit`, or an empty text; `saved` is the last backup's step."""
        if not self.exit_code and self.error:
            return (
                ". os._exit, or code outside of Python, has ended it. To end a training early, set model.stop_training = True in a "
                "callback; for an error, raise one"
            )
        if not self.is_killed and (self.loss is None or self.loss.remedy):
            return ""
        again = f"Run the command again to continue from {last_backup(saved)}"
        if saved == 0:
            again = "No backup was made"
        return f". {again}; max_restarts starts the tasks again by itself, from the last backup"

    def __str__(self) -> str:
        if self.loss:
            return self.cause
        if self.is_killed:
            return f"{self.task} was {self.cause}"
        return f"{self.task} failed with {self.cause}"


def read_failure(
    folder: str, task: TaskSpec, exit_code: int, last_line: str, log: pathlib.Path, is_out_of_memory: bool
) -> Failure:
    """Returns the failure of a task that has ended.

    Args:
        folder: The folder of the records.
        task: The task.
        exit_code: Its exit code, or minus the number of a signal.
        last_line: The last line of its output.
        log: Its log, beside which a fatal signal leaves its stacks.
        is_out_of_memory: Whether the system has killed a process, because memory was exhausted.
    """
    record = progress.read(folder, task.name)
    kind, error = _BY_EXIT_CODE.get(exit_code, Kind.ERROR), ""
    if exit_code < 0:
        is_oom = is_out_of_memory and exit_code == -signal.SIGKILL
        kind, error = Kind.MEMORY if is_oom else Kind.KILLED, stacks.fatal_place(log.with_suffix(stacks.SUFFIX))
    elif not exit_code:
        error = f"step {record.done}, epoch {record.epoch}" if record.trains else ""
    elif (
        record.exit_code == exit_code
    ):  # else another process of the task has written it, such as the script of a shell
        kind, error = Kind(record.kind), record.error
    # A task that was killed, or has succeeded, did not end because of its report.
    return Failure(task, exit_code, kind, error, last_line, record.lost if exit_code > 0 else None)


def out_of_memory_kills() -> int:
    """Returns how many processes of this process's cgroup the kernel has killed, because memory was exhausted; 0 where it is unknown."""
    kills = 0
    try:
        for line in read_file("/proc/self/cgroup").decode().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in _KILL_COUNTERS:
                counters = read_file(_KILL_COUNTERS[controllers].format(path)).split()
                kills += int(counters[counters.index(b"oom_kill") + 1])
    except (OSError, ValueError):  # another system, or a container that does not show it
        pass
    return kills


def last_backup(saved: int | None) -> str:
    """Returns the name of the step of the last backup; None if only another host's launcher knows it."""
    return "the chief's last backup, if there is one" if saved is None else f"step {saved}"


def signal_name(number: int) -> str:
    """Returns `SIGKILL` for 9, and a text for numbers without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
