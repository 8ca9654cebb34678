"""`PreparedRun`: a run that is checked, and claims its work directory, before TensorFlow is imported. No TensorFlow here."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator

from tfdist.cluster import local_cluster
from tfdist.cluster.resolvers import discovery
from tfdist.cluster.resolvers.environment import ResolvedCluster
from tfdist.config import TrainConfig, validation
from tfdist.config.cluster import worker_range
from tfdist.errors import ConfigError, collect_errors
from tfdist.runtime.folders import storage
from tfdist.runtime.folders.workdir import Workdir
from tfdist.runtime.log import logger
from tfdist.training.finished_run import SOURCE, FinishedRun


class PreparedRun:
    """A run of a configuration in a work directory, with this process's task in the environment's cluster.

    Args:
        config: The configuration.
        workdir: The work directory, or its URL.
        overwrite: Whether the run may replace a finished run.
        known: Errors that the caller has found; those of the work directory's name are among them.

    Attributes:
        started: The `time.perf_counter()` of the start.
        resolved: The cluster, or None if this process trains alone or starts the tasks.
        evaluator: The name of this task if it is an evaluator; else empty.
        is_chief: Whether this process writes the run's files. A process that starts the tasks claims the folder for them.
        starts_tasks: Whether the configuration asks for several tasks, and no cluster has them.

    Raises:
        ConfigError: The configuration, the cluster or the work directory is invalid; the error lists every problem.
        ClusterError: The other tasks have not sent their addresses in time.
    """

    def __init__(
        self, config: TrainConfig, workdir: str | os.PathLike[str], overwrite: bool, known: Collection[str] = ()
    ):
        self.started = time.perf_counter()
        self.config = config
        self.workdir = Workdir(workdir)
        self.resolved: ResolvedCluster | None = None
        self.evaluator = ""
        faults: list[str] = []
        with collect_errors(faults):
            if validation.has_wrong_types(config, "cluster", "backup", "start_timeout", "epochs"):
                validation.check(config, 0, known)  # without the cluster, which depends on these fields
            workers: int | None = 0  # until the cluster is known to be valid
            with collect_errors(faults):
                self._find_cluster()
                workers = len(self.resolved.cluster.training_tasks()) if self.resolved else None
                self._check_evaluator()
            if list(storage.faults("workdir", os.fspath(workdir))):  # without a connection
                validation.check(config, workers, known)
            self._finished = FinishedRun(config, self.workdir, overwrite)
            with collect_errors(faults):
                if not self.evaluator:  # it may evaluate a finished run's remaining backups
                    self._finished.check()
            validation.check(config, workers, known)
        if faults:
            raise ConfigError(faults)
        self.is_chief = self.resolved is None or self.resolved.task == self.resolved.cluster.chief
        self.starts_tasks = self.resolved is None and config.cluster.starts_tasks
        if self.starts_tasks and not config.cluster.ray:
            discovery.check_gpus(local_cluster(worker_range(config.cluster.workers).most, config.cluster.ps))

    def _find_cluster(self) -> None:
        arguments = self.config.cluster.resolver_arguments()
        arguments["source"] = os.environ.get(SOURCE, arguments["source"])
        self.resolved = discovery.resolve(timeout=self.config.start_timeout, **arguments)
        if self.resolved and self.resolved.task.type == "evaluator":
            self.evaluator = self.resolved.task.name

    def _check_evaluator(self) -> None:
        cluster = self.config.cluster
        if self.evaluator:
            cluster.evaluator = 1  # so that the evaluator's requirements are checked, whatever the command line sets
        elif self.resolved and self.resolved.source != "tf_config" and cluster.evaluator:
            raise ConfigError(
                f"cluster.evaluator starts a process only if this command starts the tasks, but here {self.resolved.source} starts them; leave it at 0 "
                'and start another process, with TF_CONFIG whose task is {"type": "evaluator", "index": 0}.'
            )

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Claims the work directory within the context, and removes the backups of a finished run that this one replaces.

        Raises:
            ConfigError: The work directory cannot be read or written, or another run owns it.
        """
        if self.resolved is None:
            hint = discovery.misconfiguration_hint()
            if hint:
                logger.warning(f"training on this host alone, though {hint}.")
        if self.resolved or self.starts_tasks:
            self.workdir.check_shared()
        with self.workdir.claim(self.is_chief, self.evaluator):
            if self.is_chief and not self.evaluator:
                self._finished.replace()
            yield
