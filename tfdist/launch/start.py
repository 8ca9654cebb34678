"""`Start`: the tasks of one start of a job, and `Host`: the parts that the tasks of all starts share. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import pathlib
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Self

from tfdist.cluster import ClusterSpec, TaskSpec, local
from tfdist.launch.failure import out_of_memory_kills
from tfdist.launch.guardian import Guardian
from tfdist.launch.options import Options
from tfdist.launch.output import LauncherOutput
from tfdist.launch.process import TaskProcess
from tfdist.launch.standard_input import StandardInput
from tfdist.launch.warm import WarmSpare
from tfdist.runtime.report import progress

_TURN = 0.05  # seconds between two looks at the tasks


@dataclasses.dataclass
class Host:
    """The output, the input and the helper processes that the tasks of all starts on this host share; a context manager.

    A subclass starts the tasks elsewhere (`tfdist/ray/host.py`).

    Attributes:
        options: The options of the job.
        output: Prints the tasks' lines.
        folder: The folder in which tasks write their progress.
        guardian: Kills the tasks if this process is killed.
        spare: Forks the tasks.
        stdin: The standard input, which one task may read.
    """

    options: Options
    output: LauncherOutput
    folder: str
    guardian: Guardian
    spare: WarmSpare
    stdin: StandardInput

    def __post_init__(self) -> None:
        self._out_of_memory_kills = out_of_memory_kills()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def next_cluster(self, before: ClusterSpec | None, is_stopped: Callable[[], bool]) -> ClusterSpec:
        """Returns the cluster of the next start. It may wait for it, until `is_stopped`.

        Args:
            before: The cluster of the last start, or None.
            is_stopped: Returns whether the launcher has received a signal.

        Raises:
            ClusterError: There is no place for the tasks.
        """
        if before is None:
            return self.options.cluster
        if self.options.sizes:
            return local.local_cluster(self.options.sizes.workers)
        if self.options.fresh_ports:  # another program may have taken a port
            return local.on_free_ports(before)
        return before

    def create(self, cluster: ClusterSpec, spec: TaskSpec) -> TaskProcess:
        """Starts the process of a task."""
        options = self.options
        command = [*options.prefixes.get(spec, ()), *options.command]
        environ = options.task_environ(cluster, spec, self.folder)
        log = pathlib.Path(options.log_dir, f"{spec.name}.log")
        # If the launcher is killed before it knows the task's process, the guardian looks for it.
        with self.guardian.starting():
            task = TaskProcess(spec, command, environ, log, self.spare.start, self.stdin.of(spec))
            self.guardian.watch(task.process.pid)
        return task

    def close(self, task: TaskProcess) -> None:
        """Kills the processes that an ended task has left, and prints the task's last output."""
        # They may outlive the task, and would keep its pipe open.
        task.signal(signal.SIGKILL)
        task.process.wait()
        task.over = True  # from here on another process may have its number
        before, self._out_of_memory_kills = self._out_of_memory_kills, out_of_memory_kills()
        task.is_out_of_memory = self._out_of_memory_kills > before
        self.output.drain(task)
        self.guardian.unwatch(task.process.pid)
        task.close()


class Start:
    """The tasks of one start on this host: it starts them, forwards their output, and ends them. Decisions are the launcher's.

    Args:
        host: The parts that all starts share.
        cluster: The cluster of this start.
        here: The tasks to start on this host; None means all.

    Attributes:
        running: The tasks that run.
        kill_at: The time at which the running tasks are killed, by `time.monotonic()`; None unless the start is ending.
        signals_handled: The number of the launcher's signals to which this start has reacted.
        restart: Whether all tasks start again once these have ended.
        preempted: Whether a task has saved after SIGTERM and needs a restart.
        is_growing: Whether the tasks end so that the job continues with more workers.
    """

    def __init__(self, host: Host, cluster: ClusterSpec, here: Sequence[TaskSpec] | None):
        self._host = host
        self.cluster = cluster
        self.specs = list(here or cluster.tasks())
        self.running: list[TaskProcess] = []
        self._due: dict[TaskSpec, float] = {}  # the times at which workers restart alone
        self.kill_at: float | None = None
        self.signals_handled = 0
        self.restart = False
        self.preempted = False
        self.is_growing = False

    def run(self, on_turn: Callable[[list[TaskProcess]], None]) -> None:
        """Starts all tasks, and returns when all have ended.

        `on_turn` is called about every 0.05 s with the tasks that have ended since the last call, the likely cause of the others' failures
        first.
        """
        try:
            for spec in self.specs:
                self._begin(spec)
            while self.running:
                for spec, due in list(self._due.items()):
                    if time.monotonic() >= due:
                        del self._due[spec]
                        self._begin(spec)
                self._forward_output()
                on_turn(self._take_ended())
                # After `on_turn`, which may have set the time.
                if self.kill_at is not None and time.monotonic() > self.kill_at:
                    self._signal(signal.SIGKILL)
        finally:
            for task in self.running:
                task.close()

    @property
    def waiting(self) -> list[TaskSpec]:
        """The tasks that will start again."""
        return self.specs if self.restart else list(self._due)

    def is_server(self, task: TaskSpec) -> bool:
        """Returns whether a task is a worker or server under a chief, which saves for all tasks."""
        return bool(self.cluster.jobs.get("ps")) and task != self.cluster.chief

    def reports(self) -> list[progress.Progress]:
        """Returns the records of the tasks that have begun to train."""
        found = [progress.read(self._host.folder, spec.name) for spec in self.specs]
        return [record for record in found if record.begun]

    def has_other_workers(self) -> bool:
        """Returns whether a worker runs or will restart."""
        return bool(self._due) or any(task.spec.type == "worker" for task in self.running)

    def restart_alone(self, spec: TaskSpec, delay: float) -> None:
        """Starts a task that has ended again, after `delay` seconds."""
        self._due[spec] = time.monotonic() + delay

    def end(self, grace: float, number: int | None = None) -> None:
        """Sends a signal, if any, to the running tasks, which are killed after `grace` seconds at the latest."""
        self._due = {}
        kill_at = time.monotonic() + grace
        if self.kill_at is None or kill_at < self.kill_at:  # a later signal never lengthens the grace period
            self.kill_at = kill_at
        if number is not None:
            self._signal(number)

    def _begin(self, spec: TaskSpec) -> None:
        self.running.append(self._host.create(self.cluster, spec))

    def _signal(self, number: int) -> None:
        for task in self.running:
            task.signal(number)

    def _forward_output(self) -> None:
        """Prints new lines; waits for them at most a turn."""
        output = self._host.output
        ready = connection.wait([task.pipe.fileno() for task in self.running if task.open], _TURN)
        for task in self.running:
            if task.pipe.fileno() in ready:
                output.forward(task)
            elif self._host.stdin.is_typed_for(task.spec):
                output.ask(task)

    def _take_ended(self) -> list[TaskProcess]:
        if not any(map(self._is_over, self.running)):
            return []
        # Look at all tasks again: if one task ended because of another, that other task has ended by now, too.
        ended = [task for task in self.running if self._is_over(task)]
        for task in ended:
            self.running.remove(task)
            self._host.close(task)
        return sorted(ended, key=TaskProcess.failures_by_cause)

    def _is_over(self, task: TaskProcess) -> bool:
        # A shell dies of a signal at once; the processes that it runs have the full grace period.
        has_grace = self.kill_at is not None and time.monotonic() < self.kill_at
        return task.process.poll() is not None and not (has_grace and task.signal(0))
