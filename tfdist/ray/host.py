"""`RayHost`: starts the launcher's tasks as processes of actors on the nodes of a Ray cluster. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pathlib
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.cluster.resolvers.discovery import GPUS_SHARED
from tfdist.errors import ClusterError
from tfdist.launch.process import TaskProcess
from tfdist.launch.start import Host
from tfdist.ray.actor import Event, TaskActor
from tfdist.runtime.report import progress

_TURN = 0.05  # seconds between two looks at the actors
_QUIET_SECONDS = 2.0  # of a wait for places, after which the launcher says what it waits for
# Seconds in which Ray reports a lost node, after another task has reported the loss of its connection.
_LOSS_SECONDS = 40.0
_CONNECT_SECONDS = 5.0  # limit of the first connection
_END_SECONDS = 5.0  # limit of the wait for the end of a task that has been killed
# The driver's variables that tasks get. The others are those of their node.
_PASSED = re.compile(r"(TFDIST|TF|KERAS|XLA|NCCL|GRPC)_\w+|PYTHONUNBUFFERED")


def connect(address: str) -> None:
    """Connects this process to a Ray cluster; `auto` means that of the environment.

    Raises:
        ClusterError: There is no such cluster.
    """
    if ray.is_initialized():
        return
    known = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = known.rpartition(":")
    try:
        if host and "/" not in host:  # Ray waits for a minute, and writes lines of its log
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as e:
        where = f"at {known}" if known else "in the environment (RAY_ADDRESS) or on this machine"
        raise ClusterError(
            f"no Ray cluster was found {where} ({str(e).splitlines()[0]}). Start one with `ray start --head`, and join other machines "
            "with `ray start --address=HOST:6379`; or give its address, as --ray=HOST:6379."
        ) from None


class Slot:
    """The place of one task: an actor on the node that Ray chooses. A lost actor is replaced by another one, which waits for a node.

    Args:
        create: Returns a new actor.

    Attributes:
        actor: The actor.
        is_used: Whether a task of the current start runs here.
    """

    def __init__(self, create: Callable[[], Any]):
        self._create = create
        self.is_used = False
        self._begin()

    def replace(self) -> None:
        """Asks Ray for another actor."""
        ray.kill(self.actor)  # its node may only be unreachable
        self._begin()

    def _begin(self) -> None:
        self.actor = self._create()
        self._started = self.actor.__ray_ready__.remote()
        self.ask()

    def ask(self) -> None:
        """Asks the actor for the address of its next task."""
        self._address = self.actor.address.remote()

    def has_place(self) -> bool:
        """Returns whether the actor has a node. Its next task may still wait for imports."""
        return bool(ray.wait([self._started], timeout=0)[0])

    def address(self) -> str | None:
        """Returns the address for the next task; None while the actor has no node or is not ready. Never waits."""
        if not ray.wait([self._address], timeout=0)[0]:
            return None
        try:
            return str(ray.get(self._address))
        except RayActorError:
            self.replace()
            return None


class ActorProcess:
    """A task's process in an actor, with the part of `subprocess.Popen` that the launcher uses.

    Attributes:
        pid: 0: the process is on another machine.
        returncode: The exit code, or minus the number of the signal that ended the process; None while it runs.
        is_out_of_memory: Whether its node's system has killed a process, because memory was exhausted.
    """

    pid = 0
    is_out_of_memory = False

    def __init__(
        self, slot: Slot, events: Any, output: int, on_event: Callable[[Event], None], hold: Callable[[], None]
    ):
        self.slot = slot
        self.returncode: Any = None
        self._arguments = events, output, on_event, hold
        self._thread = threading.Thread(target=self._follow, name="task", daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        """Returns `returncode`."""
        return self.returncode

    def wait(self) -> int:
        """Waits for the end of the process, which has been killed, and returns `returncode`."""
        self._thread.join(_END_SECONDS)
        if self.returncode is None:  # its node does not answer
            self.returncode = -signal.SIGKILL
            self.slot.replace()
        return int(self.returncode)

    def _follow(self) -> None:
        events, output, on_event, hold = self._arguments
        code = -signal.SIGKILL
        with open(output, "wb", buffering=0) as pipe:
            try:
                for reference in events:
                    event = ray.get(reference)
                    on_event(event)
                    pipe.write(event.output)
                    if event.exit_code is not None:
                        code = event.exit_code
                        self.is_out_of_memory = event.is_out_of_memory
            except RayActorError:
                pipe.write(b"tfdist: Ray has lost the actor of this task, or its node\n")
                if self.returncode is None:  # otherwise `wait` has replaced it
                    self.slot.replace()
            except (RayError, OSError) as e:
                code = 1
                pipe.write(f"tfdist: {type(e).__name__}: {e}\n".encode())
        if code > 0:
            hold()
        if self.returncode is None:
            self.returncode = code


class ActorTask(TaskProcess):
    """A running task in an actor."""

    process: Any  # an ActorProcess

    def signal(self, number: int) -> bool:
        """Sends a signal to the task and all processes that it has started; returns whether the task runs."""
        if self.process.returncode is not None:
            return False
        if number:
            self.process.slot.actor.signal.remote(number)
        return True


@dataclasses.dataclass
class RayHost(Host):
    """The driver of a job on a Ray cluster: places the tasks on nodes, and starts them there.

    The smallest number of workers is one placement group: Ray reserves its bundles together, and finds another node for a bundle whose node
    is lost. Each further worker of an elastic job is an actor, which Ray places when there is a node for it.

    Attributes:
        resources: The resources of each worker, by Ray's names, such as `{"CPU": 1, "GPU": 1}`.
        wait_seconds: Seconds for which a start waits for nodes.
        warm: Whether each actor forks its tasks from a process that has imported TensorFlow.
        function: As for `TaskActor`.
        on_outcome: Is called with the name and the outcome (`Event`) of each task that ends.
    """

    resources: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"CPU": 1})
    wait_seconds: float = 30.0
    warm: bool = True
    function: bytes = b""
    on_outcome: Callable[[str, bytes], object] = lambda name, outcome: None

    def __enter__(self) -> RayHost:
        options = self.options
        most = len(options.cluster.tasks())
        fewest = options.sizes.fewest if options.sizes else most
        self._running: dict[str, ActorProcess] = {}
        self._group = placement_group([dict(self.resources)] * fewest, strategy="SPREAD")
        command = [*options.command]
        if shutil.which(command[0]) == shutil.which(sys.executable):
            command[0] = ""
        environ = {name: value for name, value in self._environ().items() if name != "TF_CONFIG"}
        amounts = {f"num_{name.lower()}s": amount for name, amount in self.resources.items()}
        function = ray.put(self.function)  # once for all actors
        actor = ray.remote(max_restarts=0, max_concurrency=4, **amounts)(TaskActor)

        def create(strategy: Any) -> Any:
            return actor.options(scheduling_strategy=strategy).remote(
                command, environ, os.getcwd(), self.warm, function
            )

        strategies: list[Any] = [PlacementGroupSchedulingStrategy(self._group, index) for index in range(fewest)]
        strategies += ["SPREAD"] * (most - fewest)
        self._slots = [Slot(functools.partial(create, strategy)) for strategy in strategies]
        if options.sizes:
            options.sizes.available = lambda: sum(slot.is_used or bool(slot.address()) for slot in self._slots)
        return self

    def __exit__(self, *error: object) -> None:
        for slot in self._slots:
            ray.kill(slot.actor)
        ray.util.remove_placement_group(self._group)

    def next_cluster(self, before: ClusterSpec | None, is_stopped: Callable[[], bool]) -> ClusterSpec:
        """Waits for places, and returns the cluster of the next start. Arguments as for `Host`.

        Raises:
            ClusterError: There are fewer places than workers after `wait_seconds`.
        """
        sizes = self.options.sizes
        begun = time.monotonic()
        self._running = {}
        for slot in self._slots:
            if slot.address():  # its port may be taken, or its node lost
                slot.ask()
            slot.is_used = False
        announced = False
        while not is_stopped():
            workers = sizes.workers if sizes else len(self._slots)
            places = {slot: address for slot in self._slots if (address := slot.address())}
            if len(places) >= workers:
                self._placed = [*places][:workers]
                for slot in self._placed:
                    slot.is_used = True
                return ClusterSpec({"worker": [places[slot] for slot in self._placed]})
            waited = time.monotonic() - begun
            # Workers on a busy machine are slow to import TensorFlow, which another wait for nodes does not change.
            placed = sum(slot.has_place() for slot in self._slots)
            if placed >= workers:
                pass
            elif waited > self.wait_seconds:
                if sizes is None or placed < sizes.fewest:
                    raise ClusterError(
                        f"{self._shortage(workers, placed)}. Add nodes, or lower the resources of a worker (--cpus_per_worker, --gpus_per_worker), or wait longer than {self.wait_seconds:g} s (--join_seconds)."
                    )
                sizes.fit(placed)
                self.output.say(
                    f"{self._shortage(workers, placed)}; starting {sizes.workers}. Add nodes to continue with more"
                )
            elif waited > _QUIET_SECONDS and not announced:
                announced = True
                self.output.say(
                    f"{self._shortage(workers, placed)}; waiting. Add nodes, or lower the resources of a worker (--cpus_per_worker, --gpus_per_worker)"
                )
            time.sleep(_TURN)
        return before or self.options.cluster

    def create(self, cluster: ClusterSpec, spec: TaskSpec) -> TaskProcess:
        """Starts the process of a task in its actor; the evaluator starts here."""
        if spec.type == "evaluator":
            return super().create(cluster, spec)
        slot = self._placed[spec.index]
        environ = self._environ(cluster, spec)

        def start(command: Sequence[str], variables: Mapping[str, str], output: int, stdin: int) -> Any:
            files = {
                name: content for name, content in progress.records(self.folder).items() if not name.endswith(".json")
            }
            events = slot.actor.run.options(num_returns="streaming").remote(variables, files)
            process = ActorProcess(
                slot,
                events,
                os.dup(output),
                functools.partial(self._store, spec),
                lambda: self._hold(spec),
            )
            self._running[str(spec)] = process
            return process

        log = pathlib.Path(self.options.log_dir, f"{spec.name}.log")
        return ActorTask(spec, self.options.command, {**environ, progress.FOLDER: self.folder}, log, start)

    def close(self, task: TaskProcess) -> None:
        """Kills the processes that an ended task has left, and prints the task's last output."""
        if not isinstance(task, ActorTask):
            super().close(task)
            return
        task.process.wait()
        task.over = True
        task.is_out_of_memory = task.process.is_out_of_memory
        self.output.drain(task)
        task.close()

    def _environ(self, cluster: ClusterSpec | None = None, spec: TaskSpec | None = None) -> dict[str, str]:
        cluster = cluster or self.options.cluster
        environ = self.options.task_environ(cluster, spec or cluster.tasks()[0], self.folder)
        if self.resources.get("GPU"):  # Ray sets CUDA_VISIBLE_DEVICES of each actor
            environ[GPUS_SHARED] = "1"
        return {name: value for name, value in environ.items() if _PASSED.fullmatch(name)}

    def _store(self, spec: TaskSpec, event: Event) -> None:
        if event.exit_code is not None:
            self.on_outcome(spec.name, event.outcome)
        try:
            progress.store(self.folder, event.files)
        except OSError:  # a full disk must not end a training
            pass

    def _hold(self, spec: TaskSpec) -> None:
        """Delays the end of a task that reports the loss of others until Ray has reported that loss: it is the cause."""
        loss = progress.read(self.folder, spec.name).lost
        if loss is None:
            return
        names = re.split(", ?", loss.task)
        lost = [process for name, process in self._running.items() if name in names]
        until = time.monotonic() + _LOSS_SECONDS
        while lost and all(process.returncode is None for process in lost) and time.monotonic() < until:
            time.sleep(_TURN)

    def _shortage(self, workers: int, places: int) -> str:
        """Returns a sentence about the places that are missing, with the resources of the cluster."""
        each = ", ".join(f"{amount:g} {name}" for name, amount in self.resources.items())
        offers = ray.cluster_resources()
        offered = ", ".join(f"{amount:g} {name}" for name, amount in sorted(offers.items()) if name in ("CPU", "GPU"))
        nodes = sum(node["Alive"] for node in ray.nodes())
        return f"{places} of {workers} workers have a place on the Ray cluster, with {each} each; its {nodes} nodes offer {offered or 'neither CPU nor GPU'}"
