"""`Rounds`: the starts of an elastic job on several hosts. No TensorFlow here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.launch.agreement import Agreement, Done, Interruption
from tfdist.launch.launcher_lines import launcher_address

_LEADER = 0


class Start(NamedTuple):
    """A start of this host's tasks: the cluster, the tasks to start here, and the restarts of the job so far."""

    cluster: ClusterSpec
    here: list[TaskSpec]
    restarts: int


class Rounds:
    """The starts of a job whose number of hosts may change; a context manager. The job's launchers agree on each start (`Agreement`).

    Args:
        hosts: The addresses of the workers of each host, by host. All hosts have the same number.
        me: The index of this host.
        fewest: The smallest number of hosts.
        most: The largest number of hosts.
        replicas: The number of replicas of all workers together, which the workers of each start divide.
        join_seconds: Seconds for which a start waits for further hosts.

    Attributes:
        replicas: The number of replicas.
        workers: The number of workers of the current start.
        most_workers: The largest number of workers.
    """

    def __init__(
        self, hosts: Sequence[Sequence[str]], me: int, fewest: int, most: int, replicas: int, join_seconds: float
    ):
        self.replicas, self._hosts, self._me = replicas, hosts, me
        per_host = len(hosts[0])
        self.workers = self.most_workers = most * per_host
        allowed = [number for number in range(most, fewest - 1, -1) if replicas % (number * per_host) == 0]
        options = f"nnodes={fewest}:{most} workers_per_host={per_host} replicas={replicas}"
        addresses = [launcher_address(workers[0]) for workers in hosts]
        self._agreement = Agreement(addresses, me, fewest, allowed, join_seconds, options)
        self._saved: int | None = None  # the step of the newest backup of the current tasks
        self.leads = me == _LEADER

    def __enter__(self) -> Rounds:
        self._agreement.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._agreement.__exit__(*error)  # type: ignore[arg-type]

    def next_cluster(self, stop: Callable[[], bool], restarts: int) -> Start | Done | None:
        """Waits for the next start of this host's tasks.

        Args:
            stop: Returns whether to stop waiting.
            restarts: The restarts of this host so far.

        Returns:
            The start; the end of the job; or None if `stop` returned True.

        Raises:
            ClusterError: As `Agreement.next_round`.
        """
        outcome = self._agreement.next_round(stop, restarts)
        if outcome is None or isinstance(outcome, Done):
            return outcome
        workers = [address for host in outcome.hosts for address in self._hosts[host]]
        own = set(self._hosts[self._me])
        here = [TaskSpec("worker", index) for index, address in enumerate(workers) if address in own]
        self.workers, self._saved = len(workers), None
        return Start(ClusterSpec({"worker": workers}), here, max(restarts, outcome.restarts))

    @property
    def is_full(self) -> bool:
        """Returns whether the job cannot grow; on other launchers than the leader always True."""
        return not self.leads or self.workers == self.most_workers

    def grow(self) -> None:
        """Has no effect: the next start takes the hosts that are ready."""

    def interruption(self) -> Interruption | None:
        """Returns why this host's tasks must end now, or None."""
        return self._agreement.members_failed()

    def should_grow(self, saved: int) -> bool:
        """Notes the step of the last backup, and returns whether the job should start again on more hosts."""
        is_new = self._saved is not None and saved > self._saved
        self._saved = saved if self._saved is None else self._saved
        return is_new and self.leads and bool(self._agreement.newcomers())

    def failed(self, why: str, saved: int | None) -> None:
        """Publishes that this host's tasks have ended and need a restart."""
        self._agreement.report("failed", why=why, saved=saved)

    def ended(self, code: int, why: str = "") -> None:
        """Publishes that this host's tasks have ended. An exit code other than 0 ends the job."""
        if self.leads and code:
            self._agreement.finish(code, why)
        else:
            self._agreement.report("ended", code, why)

    def all_ended(self) -> bool:
        """Returns whether the tasks of all other hosts have ended with exit code 0; on other launchers than the leader always True."""
        return not self.leads or self._agreement.members_ended()

    def finish(self, code: int) -> None:
        """Ends the job on all hosts; has an effect on the leader only."""
        self._agreement.finish(code)
