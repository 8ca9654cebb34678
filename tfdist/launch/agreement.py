"""`Agreement`: the agreement of launchers on the hosts that train. No TensorFlow here.

The launcher of the first host leads. It opens rounds: a round is one start of the job's tasks, on some of the hosts. Each launcher
publishes its state in one line (`launcher_lines.py`): the leader reads the lines of all launchers, and all launchers read the leader's.

A launcher has a random identifier, and a round names its members' identifiers. So a restarted launcher is not a member of
its predecessor's round, and a restarted leader opens rounds of a new job.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tfdist.cluster.spec import split_address
from tfdist.errors import ClusterError, ConfigError, list_first
from tfdist.launch.launcher_lines import POLL_SECONDS, POLL_SECONDS_WAITING, Line, LinePoll, LineServer
from tfdist.runtime.log import logger

_LEADER = 0  # the index of the leading launcher's host
_REPORT_EVERY = 10.0  # seconds
_LONGEST_TURN = 5.0  # limit of the seconds counted at once, because this process itself may have been stopped
_TURN = 0.05  # seconds between two looks at the answers
_LINGER = 5.0  # seconds for which the leader waits until the others have read that the job is done
_GONE = "connection refused"  # the kernel closes the port of a process that has ended


class Round(NamedTuple):
    """A start of the job's tasks.

    Attributes:
        number: The number of the round, from 1.
        hosts: The indices of the hosts that train, ascending; the first host is always one of them.
        restarts: The restarts of the job so far, as the leader counts them.
    """

    number: int
    hosts: tuple[int, ...]
    restarts: int = 0


class Done(NamedTuple):
    """The end of the job.

    Attributes:
        code: The exit code of the job.
        why: The reason, or an empty text.
    """

    code: int
    why: str = ""


class Interruption(NamedTuple):
    """The reason for which a launcher ends its tasks of the current round.

    Attributes:
        why: A sentence that names the host.
        code: None if the job continues in another round (`Agreement.next_round`); else the exit code with which the job ends.
        saved: The step of the last backup that the failed launcher knows, or None.
    """

    why: str
    code: int | None = None
    saved: int | None = None


class Agreement:
    """Agreement of the launchers of several hosts on the hosts that train: a context manager that listens at the launcher's address.

    No method waits for another host, except `next_round` and `finish`, which have limits.

    Args:
        hosts: The `host:port` of each host's launcher (`launcher_address`), equal on all hosts. The first one leads.
        me: The index of this host.
        fewest: The smallest number of hosts that may train.
        allowed: The numbers of hosts that may train, descending.
        join_seconds: Seconds for which the leader waits for further hosts once an allowed number is ready.
        token: The options that must be equal on all hosts.
        wait_seconds: Seconds for which a launcher waits for the leader's answer, or the leader for the fewest hosts.
        settle_seconds: Seconds after which a launcher with other options is an error: the launcher of an earlier job may still be ending.

    Raises:
        ConfigError: No number in `allowed` is at least `fewest` and at most the number of hosts.

    Examples:
        >>> from tfdist.cluster import free_ports
        >>> from tfdist.launch.agreement import Agreement
        >>> from tfdist.launch.launcher_lines import launcher_address
        >>> hosts = [launcher_address(f"127.0.0.1:{port + 1}") for port in free_ports(2)]
        >>> with Agreement(hosts, me=0, fewest=1, allowed=[2, 1], join_seconds=0.0, token="nnodes=1:2") as agreement:
        ...     agreement.next_round(stop=lambda: False)
        ...     agreement.finish(0)
        Round(number=1, hosts=(0,), restarts=0)
    """

    def __init__(
        self,
        hosts: Sequence[str],
        me: int,
        fewest: int,
        allowed: Sequence[int],
        join_seconds: float,
        token: str,
        wait_seconds: float = 300.0,
        settle_seconds: float = 10.0,
    ):
        self._allowed = [number for number in allowed if fewest <= number <= len(hosts)]
        if not self._allowed:
            raise ConfigError(
                f"No allowed number of hosts is at least {fewest} and at most {len(hosts)}, the number of hosts. "
                f"Allowed: {', '.join(map(str, allowed))}. Change --nnodes, or the list of hosts."
            )
        self._addresses, self._me = list(hosts), me
        self._join_seconds, self._wait_seconds, self._settle_seconds = join_seconds, wait_seconds, settle_seconds
        names = [split_address(address)[0] for address in hosts]
        self._names = names if len(set(names)) == len(names) else self._addresses
        self._line = Line(
            _checksum(list(hosts)), _checksum(token), me, uuid.uuid4().hex[:16], "waiting" if me == _LEADER else "ready"
        )
        self._lock = threading.Lock()  # of `_line`: threads of the poll change it, too
        self._leader = ""  # the last leader whose job was not over
        self._opened = 0.0  # the time of the current round's start
        self._members: dict[int, str] = {}  # host -> launcher
        self._warned: set[tuple[int, str]] = set()
        self._is_finished = False

    def __enter__(self) -> Agreement:
        self._server = LineServer(
            self._addresses[self._me], f"the launcher of {self._names[self._me]}", lambda: self._line
        )
        polled = range(len(self._addresses)) if self._leads else (_LEADER, self._me)
        self._poll = LinePoll({host: self._addresses[host] for host in polled}, self._on_line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        try:
            if error and self._leads and not self._is_finished:
                self.finish(1, str(error))  # otherwise the others would wait for the leader
        finally:
            self._poll.close()
            self._server.close()

    def next_round(self, stop: Callable[[], bool], restarts: int = 0) -> Round | Done | None:
        """Waits for the next round with this host, or for the end of the job. This launcher's tasks must have ended.

        The leader opens the round. It takes all hosts whose launchers are ready, up to the largest allowed number, in the order of the list.
        It waits for further hosts for `join_seconds`: at the first start for all hosts, later for members of the last round and for launchers
        that answer. The state of this launcher is then `training`.

        Args:
            stop: Called about every 0.05 s; if it returns True, the wait ends.
            restarts: The leader's count of restarts, for the other launchers.

        Returns:
            The round; the end of the job, except on the leader; or None if `stop` has returned True.

        Raises:
            ClusterError: The leader does not answer, or too few hosts are ready, for `wait_seconds`; or another launcher was started with other
                hosts or options, or as this host.
        """
        self._poll.interval = POLL_SECONDS_WAITING
        outcome = self._open_round(stop, restarts) if self._leads else self._await_round(stop)
        self._poll.interval = POLL_SECONDS
        return outcome

    def report(self, state: Literal["failed", "ended"], code: int = 0, why: str = "", saved: int | None = None) -> None:
        """Publishes that this launcher's tasks have ended.

        Args:
            state: `failed` if the tasks need a restart, `ended` if not.
            code: The exit code of tasks that have ended. A code other than 0 ends the job.
            why: The reason, such as `worker:1 lost at step 400 (killed by SIGKILL)`.
            saved: The step of the last backup, if it is known.
        """
        if self._leads:
            state_of_leader = "waiting" if state == "failed" else self._line.state
            self._publish(state=state_of_leader, why=why, saved=saved)
        else:
            self._publish(state=state, code=code, why=why, saved=saved)

    def members_failed(self) -> Interruption | None:
        """Returns the reason to end this launcher's tasks of the current round, or None."""
        return self._interruption_by_members() if self._leads else self._interruption_by_leader()

    def members_ended(self) -> bool:
        """Returns whether the tasks of all other members have ended with exit code 0; on the leader only."""
        lines = [self._poll[host].last for host in self._members if host != self._me]
        return all(line and self._is_of_round(line) and line.state == "ended" and not line.code for line in lines)

    def newcomers(self) -> tuple[int, ...]:
        """Returns the ready hosts outside of the round with which a larger round is possible; on the leader only."""
        outside = tuple(host for host in self._ready() if host not in self._members)
        size = len(self._members)
        return outside if any(size < number <= size + len(outside) for number in self._allowed) else ()

    def finish(self, code: int, why: str = "") -> None:
        """Publishes the end of the job, and waits until all launchers that answer have read it, at most 5 s; on the leader only.

        Args:
            code: The exit code of the job.
            why: The reason, for the messages of the other launchers.
        """
        if not self._leads or self._is_finished:
            return
        self._is_finished = True
        self._poll.interval = POLL_SECONDS_WAITING
        self._publish(state="done", code=code, why=why)
        ends = time.monotonic() + _LINGER
        while time.monotonic() < ends and not all(map(self._has_read_the_end, self._others())):
            time.sleep(_TURN)

    @property
    def _leads(self) -> bool:
        return self._me == _LEADER

    def _publish(self, **changes: Any) -> None:
        with self._lock:
            self._line = dataclasses.replace(self._line, **changes)

    def _on_line(self, host: int, line: Line) -> None:
        """Notes the leader's line in a thread of the poll: when the main thread looks, the leader may have ended."""
        if host != _LEADER or self._leads or self._difference(host, line):
            return
        if line.state != "done":
            self._leader = line.launcher
        self._publish(over=line.state == "done")

    # The leader

    def _open_round(self, stop: Callable[[], bool], restarts: int) -> Round | None:
        self._publish(state="waiting", restarts=restarts)
        enough, too_few, differing, report = _Duration(), _Duration(), _Duration(), _Report()
        while not stop():
            ready = self._ready()
            size = next((number for number in self._allowed if number <= len(ready)), 0)
            awaited = [] if size == self._allowed[0] else self._awaited(ready)
            waited = enough.count(bool(size))
            if size and (not awaited or waited >= self._join_seconds):
                return self._begin_round(dict(list(ready.items())[:size]), restarts)
            self._check_differences(differing, is_fatal=self._line.round == 0)
            absent = ", ".join(map(self._describe, awaited or [host for host in self._others() if host not in ready]))
            if too_few.count(not size) >= self._wait_seconds:
                raise ClusterError(
                    f"Waited {self._wait_seconds:.0f} s for the launchers of {absent}: {len(ready)} of at least {self._allowed[-1]} hosts are ready. "
                    "Run the same command on each host, and open this port between the hosts."
                )
            report.write(f"waiting for the launchers of {absent}")
            time.sleep(_TURN)
        return None

    def _begin_round(self, members: dict[int, str], restarts: int) -> Round:
        number = self._line.round + 1
        self._members, self._opened = members, time.monotonic()
        self._publish(
            state="training",
            leader=self._line.launcher,
            round=number,
            members=tuple(members.items()),
            code=0,
            saved=None,
            why="",
        )
        absent = [self._describe(host) for host in self._others() if host not in members]
        without = f", without {list_first(absent, 4)}" if absent else ""
        logger.info(f"round {number}: {list_first([self._names[host] for host in members], 8)}{without}")
        return Round(number, tuple(members), restarts)

    def _others(self) -> list[int]:
        return [host for host in range(len(self._addresses)) if host != self._me]

    def _ready(self) -> dict[int, str]:
        """Returns the launchers that can take part in a new round, by host, in the order of the list."""
        ready = {self._me: self._line.launcher}
        for host in self._others():
            line = self._poll[host].line
            is_free = line and (line.state == "ready" or (line.state == "ended" and not line.code))
            if line and is_free and not self._difference(host, line):
                ready[host] = line.launcher
        return dict(sorted(ready.items()))

    def _awaited(self, ready: Mapping[int, str]) -> list[int]:
        """Returns the hosts that are not ready, but may be ready soon."""
        absent = [host for host in self._others() if host not in ready]
        if self._line.round == 0:
            return absent
        answering = [host for host in absent if (line := self._poll[host].line) and not self._difference(host, line)]
        return [host for host in absent if host in self._members or host in answering]

    def _describe(self, host: int) -> str:
        """Returns `host1 at host1:2221 (connection refused)`."""
        answer = self._poll[host]
        line = answer.line
        reason = answer.reason
        if line:
            reason = self._difference(host, line) or ("ready" if host in self._ready() else "its tasks are ending")
        return f"{self._at(host)} ({reason})"

    def _at(self, host: int) -> str:
        name, address = self._names[host], self._addresses[host]
        return name if name == address else f"{name} at {address}"

    def _interruption_by_members(self) -> Interruption | None:
        for host, launcher in self._members.items():
            if host == self._me:
                continue
            answer, name = self._poll[host], self._names[host]
            line = answer.line
            if line and line.launcher != launcher:
                return Interruption(f"the launcher of {name} was started again")
            if line and self._is_of_round(line) and line.state in ("failed", "ready"):
                return Interruption(f"{name}: {line.why or 'its tasks have failed'}", saved=line.saved)
            if line and self._is_of_round(line) and line.state == "ended" and line.code:
                why = line.why or "its tasks have ended"
                return Interruption(f"{name}: {why} (exit code {line.code})", line.code, line.saved)
            last = answer.last
            has_ended = last and self._is_of_round(last) and last.state == "ended"
            if not line and answer.reason == _GONE and not has_ended:
                return Interruption(f"the launcher of {name} has ended ({_GONE} at {self._addresses[host]})")
            is_late = time.monotonic() - self._opened > max(self._join_seconds, _REPORT_EVERY)
            if is_late and not (last and last.launcher == launcher and self._is_of_round(last)):
                return Interruption(f"the launcher of {self._describe(host)} does not start its tasks")
        return None

    def _is_of_round(self, line: Line) -> bool:
        return (line.leader, line.round) == (self._line.leader, self._line.round)

    def _has_read_the_end(self, host: int) -> bool:
        line = self._poll[host].line
        return not line or line.over or bool(self._difference(host, line))

    # The other launchers

    def _await_round(self, stop: Callable[[], bool]) -> Round | Done | None:
        own = self._line
        is_over = own.state == "ended" and own.code != 0
        if own.state != "ended":
            self._publish(state="ready")
        silent, differing, report = _Duration(), _Duration(), _Report()
        announced = (own.leader, own.round)
        while not stop():
            answer = self._poll[_LEADER]
            line = answer.last if answer.last and answer.last.state == "done" else answer.line
            if line and self._difference(_LEADER, line):
                line = None
            if line and line.state == "done" and line.launcher in (self._leader, own.leader):
                return Done(line.code, line.why)
            if line and line.state != "done":
                if is_over and line.launcher != own.leader:
                    return Done(own.code, own.why)  # the leader of that job has ended
                current = (line.launcher, line.round)
                if line.state == "training" and current != (own.leader, own.round) and not is_over:
                    if (self._me, own.launcher) in line.members:
                        return self._join_round(line)
                    if announced != current:
                        announced = current
                        hosts = list_first(self._named(line.members), 8)
                        logger.info(f"round {line.round} trains on {hosts}; this host waits until the job can use it")
            self._check_differences(differing, is_fatal=True)
            if silent.count(not line or line.state == "done") >= self._wait_seconds:
                raise ClusterError(
                    f"Waited {self._wait_seconds:.0f} s for the launcher of {self._describe_leader()}, which leads. Run the same command there, "
                    "and open this port between the hosts."
                )
            if silent.seconds:
                report.write(f"waiting for the launcher of {self._describe_leader()}, which leads")
            time.sleep(_TURN)
        return None

    def _join_round(self, line: Line) -> Round:
        self._publish(
            state="training", leader=line.launcher, round=line.round, code=0, saved=None, why="", restarts=line.restarts
        )
        hosts = tuple(host for host, _ in line.members)
        logger.info(f"round {line.round}: {list_first(self._named(line.members), 8)}")
        return Round(line.round, hosts, line.restarts)

    def _named(self, members: Sequence[tuple[int, str]]) -> list[str]:
        return [self._names[host] for host, _ in members if host < len(self._names)]

    def _describe_leader(self) -> str:
        answer = self._poll[_LEADER]
        reason = self._difference(_LEADER, answer.line) or "its job is over" if answer.line else answer.reason
        return f"{self._at(_LEADER)} ({reason})"

    def _interruption_by_leader(self) -> Interruption | None:
        answer, name, own = self._poll[_LEADER], self._names[_LEADER], self._line
        last = answer.last
        if last and last.state == "done" and last.launcher == own.leader:
            why = f": {last.why}" if last.why else ""
            return Interruption(f"{name} has ended the job{why}", last.code) if last.code else None
        line = answer.line
        if not line:
            is_gone = answer.reason == _GONE
            return (
                Interruption(f"the launcher of {name}, which leads, has ended ({_GONE} at {self._addresses[_LEADER]})")
                if is_gone
                else None
            )
        if line.launcher != own.leader:
            return Interruption(f"the launcher of {name}, which leads, was started again")
        why = f": {line.why}" if line.why else ""
        if line.round != own.round:
            return Interruption(f"{name} has opened round {line.round}{why}")
        return Interruption(f"{name} has ended round {line.round}{why}") if line.state == "waiting" else None

    # All launchers

    def _difference(self, host: int, line: Line) -> str:
        """Returns how the launcher that answers at a host's address differs from the expected one, or an empty text."""
        if line.hosts != self._line.hosts:
            return "it was started with another list of hosts"
        if line.host != host:
            return f"the launcher of {self._names[line.host]} answers there" if line.host < len(self._names) else ""
        if line.options != self._line.options:
            return "it was started with other options"
        if host == self._me and line.launcher != self._line.launcher:
            return "another launcher was started as this host"
        return ""

    def _check_differences(self, duration: _Duration, is_fatal: bool) -> None:
        """Raises an error that names the launchers that differ for `settle_seconds`, or logs them once.

        Raises:
            ClusterError: A launcher differs, and `is_fatal`.
        """
        polled = range(len(self._addresses)) if self._leads else (_LEADER, self._me)
        differences = {
            host: difference
            for host in polled
            if (line := self._poll[host].line) and (difference := self._difference(host, line))
        }
        if duration.count(bool(differences)) < self._settle_seconds:
            return
        text = ", ".join(f"{self._at(host)} ({difference})" for host, difference in differences.items())
        if is_fatal:
            raise ClusterError(
                f"The launchers differ from that of {self._names[self._me]}: {text}. Run the same command once on each host."
            )
        if new := set(differences.items()) - self._warned:
            self._warned |= new
            logger.warning(f"launchers that cannot take part: {text}. Run the same command once on each host")


class _Duration:
    """Seconds for which a condition has held without interruption. Time in which this process was stopped counts at most 5 s.

    Attributes:
        seconds: The seconds.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._held_at: float | None = None

    def count(self, holds: bool) -> float:
        """Counts the seconds since the last call if the condition held then and holds now; returns the sum."""
        now = time.monotonic()
        if holds and self._held_at is not None:
            self.seconds += min(now - self._held_at, _LONGEST_TURN)
        elif not holds:
            self.seconds = 0.0
        self._held_at = now if holds else None
        return self.seconds


class _Report:
    """A log line that is written every 10 s, for the first time after 10 s."""

    def __init__(self) -> None:
        self._written = time.monotonic()

    def write(self, text: str) -> None:
        if time.monotonic() - self._written >= _REPORT_EVERY:
            self._written = time.monotonic()
            logger.info(text)


def _checksum(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
