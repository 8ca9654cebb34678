"""Launchers of several hosts agree on the hosts that train, whatever becomes of one of them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.helpers.launched_job import until
from tfdist.cluster import free_ports
from tfdist.errors import ClusterError, ConfigError
from tfdist.launch import agreement as agreement_lib
from tfdist.launch import launcher_lines
from tfdist.launch.agreement import Agreement, Done, Interruption, Round

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 60.0  # seconds, which only a hang reaches
LONG = 600.0  # seconds that no test waits for


def addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    return [f"{host}:{port}" for port in free_ports(count)]


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def enter(stack):
    """Starts the agreement of a host; `leave` of what it returns ends it as its launcher's end does."""

    def enter(hosts, me, fewest=1, allowed=(), join_seconds=LONG, token="same", **limits) -> Agreement:
        agreement = Agreement(
            hosts,
            me,
            fewest,
            allowed or range(len(hosts), 0, -1),
            join_seconds,
            token,
            **{"wait_seconds": LONG, **limits},
        )
        own = stack.enter_context(contextlib.ExitStack())
        agreement = own.enter_context(agreement)
        agreement.leave = own.close
        return agreement

    return enter


def begin(*agreements: Agreement):
    """Waits for the next round of several hosts at once; returns a future for each."""
    ends = time.monotonic() + LIMIT
    pool = concurrent.futures.ThreadPoolExecutor(len(agreements))
    futures = [pool.submit(agreement.next_round, lambda: time.monotonic() > ends) for agreement in agreements]
    pool.shutdown(wait=False)
    return futures


def await_ready(leader: Agreement, *hosts: int) -> None:
    until(lambda: {*hosts} <= {*leader._ready()})


def meet(first: Agreement, *others: Agreement):
    """Returns the next round, or the end, of several hosts; a leader begins when it knows that the others are ready."""
    futures = begin(*others) if others else []
    if first._leads:
        await_ready(first, *(other._me for other in others))
    return [future.result(2 * LIMIT) for future in [*begin(first), *futures]]


def interruption(agreement: Agreement) -> Interruption:
    until(agreement.members_failed)
    return agreement.members_failed()


def end(leader: Agreement, *others: Agreement, code: int = 0) -> None:
    """Ends the job on the leader, and finds that the others return its exit code."""
    futures = begin(*others)
    leader.finish(code)
    assert [future.result(LIMIT).code for future in futures] == [code] * len(others)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_all_hosts_train_from_the_first_round_to_the_end(enter, host):
    if host == "[::1]" and not has_ipv6():
        pytest.skip("needs IPv6")
    hosts = addresses(3, host)
    leader, *others = (enter(hosts, me) for me in range(3))
    assert meet(leader, *others) == [Round(1, (0, 1, 2))] * 3
    assert not leader.members_failed() and not leader.newcomers() and not leader.members_ended()
    for other in others:
        other.report("ended")
    until(leader.members_ended)
    end(leader, *others)
    # The leader has gone, and what it said last is still known.
    leader.leave()
    assert meet(*others) == [Done(0)] * 2 and not others[0].members_failed()


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def test_a_failure_on_one_host_begins_a_round_on_all_even_on_one_that_had_ended(enter):
    leader, other, third = agreements = [enter(hosts, me) for hosts in [addresses(3)] for me in range(3)]
    meet(*agreements)
    third.report("ended")
    other.report("failed", 1, "worker:1 lost at step 7 (killed by SIGKILL)", saved=4)
    why = "worker:1 lost at step 7 (killed by SIGKILL)"
    lost = interruption(leader)
    assert lost.why.endswith(f": {why}") and (lost.code, lost.saved) == (None, 4)
    leader.report("failed", why=lost.why)
    assert why in interruption(third).why
    ends = time.monotonic() + LIMIT
    futures = begin(other, third)
    assert leader.next_round(lambda: time.monotonic() > ends, restarts=1) == Round(2, (0, 1, 2), 1)
    assert [future.result(LIMIT) for future in futures] == [Round(2, (0, 1, 2), 1)] * 2
    end(*agreements)


def test_the_failure_of_the_leaders_tasks_ends_those_of_the_others(enter):
    hosts = addresses(2)
    leader, other = enter(hosts, 0), enter(hosts, 1)
    meet(leader, other)
    leader.report("failed", why="worker:0 lost")
    assert interruption(other) == Interruption(f"{hosts[0]} has ended round 1: worker:0 lost")
    other.report("failed", why=interruption(other).why)
    assert meet(leader, other) == [Round(2, (0, 1))] * 2


def test_an_end_that_a_restart_would_repeat_ends_the_job_with_its_code(enter):
    hosts = addresses(3)
    leader, other, third = (enter(hosts, me) for me in range(3))
    meet(leader, other, third)
    other.report("ended", 2, "worker:1: epochs must be 1 or more")
    lost = interruption(leader)
    assert lost == Interruption(f"{hosts[1]}: worker:1: epochs must be 1 or more (exit code 2)", 2)
    leader.finish(lost.code, lost.why)
    assert interruption(third) == Interruption(f"{hosts[0]} has ended the job: {lost.why}", 2)
    assert meet(other, third) == [Done(2, lost.why)] * 2


def test_the_job_shrinks_to_an_allowed_size_and_grows_when_the_host_is_back(enter):
    hosts = addresses(4)
    agreements = [enter(hosts, me, allowed=(4, 2, 1), join_seconds=0.5) for me in range(4)]
    leader, *others = agreements
    assert meet(*agreements) == [Round(1, (0, 1, 2, 3))] * 4
    others[0].leave()
    assert interruption(leader).why == f"the launcher of {hosts[1]} has ended (connection refused at {hosts[1]})"
    leader.report("failed", why="a host is lost")
    spare = begin(others[2])
    await_ready(leader, 3)  # three hosts are ready, and two may train: the first two of the list
    assert meet(leader, others[1]) == [Round(2, (0, 2))] * 2
    assert not leader.newcomers(), "three hosts may not train"
    back = enter(hosts, 1, allowed=(4, 2, 1), join_seconds=0.5)
    futures = [*spare, *begin(back)]
    until(leader.newcomers)
    assert leader.newcomers() == (1, 3)
    assert not any(future.done() for future in futures), "they are not of the round that runs"
    leader.report("failed", why="the job grows")
    assert interruption(others[1]).why.endswith("the job grows")
    await_ready(leader, 1, 3)
    assert meet(leader, others[1]) == [Round(3, (0, 1, 2, 3))] * 2
    assert [future.result(LIMIT) for future in futures] == [Round(3, (0, 1, 2, 3))] * 2


def test_a_launcher_that_is_started_again_is_of_no_round_before_the_next(enter):
    hosts = addresses(2)
    leader, other = enter(hosts, 0), enter(hosts, 1)
    meet(leader, other)
    other.leave()
    other = enter(hosts, 1)
    (waits,) = begin(other)
    until(lambda: (lost := leader.members_failed()) and "started again" in lost.why)
    leader.report("failed")
    assert meet(leader) == [Round(2, (0, 1))] == [waits.result(LIMIT)]


def test_a_leader_that_is_started_again_leads_the_same_hosts_in_a_new_job(enter):
    hosts = addresses(2)
    leader, other = enter(hosts, 0), enter(hosts, 1)
    meet(leader, other)
    leader.leave()
    lost = interruption(other)
    assert lost.why == f"the launcher of {hosts[0]}, which leads, has ended (connection refused at {hosts[0]})"
    other.report("failed", why=lost.why)
    assert meet(enter(hosts, 0), other) == [Round(1, (0, 1))] * 2


def test_a_host_that_was_away_before_is_not_waited_for_again(enter):
    hosts = addresses(3)
    leader = enter(hosts, 0, join_seconds=0.5)
    other = enter(hosts, 1)
    assert meet(leader, other) == [Round(1, (0, 1))] * 2
    leader._join_seconds = LONG
    leader.report("failed")
    assert meet(leader, other) == [Round(2, (0, 1))] * 2


def test_the_end_of_a_job_is_not_that_of_the_next(enter):
    """The leader of a job waits for the others when its job is over; a launcher of the next job may meet it then."""
    hosts = addresses(2)
    leader = enter(hosts, 0, join_seconds=0.0)
    assert meet(leader) == [Round(1, (0,))]
    leader.finish(0)
    early = enter(hosts, 1)
    (waits,) = begin(early)
    until(lambda: (line := launcher_lines.fetch_line(hosts[1])[0]) and line.over)
    leader.leave()
    assert meet(enter(hosts, 0)) == [Round(1, (0, 1))] == [waits.result(LIMIT)]


def test_the_stop_of_the_launcher_ends_the_wait(enter):
    hosts = addresses(2)
    assert enter(hosts, 0, fewest=2).next_round(lambda: True) is None
    assert enter(hosts, 1).next_round(lambda: True) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token": "other"}, "it was started with other options"),
        ({"hosts": ["h:1", "h:2", "h:3"]}, "it was started with another list of hosts"),
        ({"me": 2}, "the launcher of HOST2 answers there"),
    ],
)
def test_a_launcher_that_differs_is_named_and_the_others_end(enter, stack, change, words):
    hosts = addresses(3)
    arguments = {"hosts": hosts, "me": 1, "token": "same", **change}
    line = Agreement(fewest=1, allowed=[1], join_seconds=LONG, **arguments)._line
    stack.callback(launcher_lines.LineServer(hosts[1], "the launcher", lambda: line).close)
    leader = enter(hosts, 0, settle_seconds=1.0)
    last = enter(hosts, 2)
    until(lambda: last._leader)
    waiting, waits = begin(leader, last)
    error = waiting.exception(LIMIT)
    assert isinstance(error, ClusterError)
    assert f"{hosts[1]} ({words.replace('HOST2', hosts[2])})" in str(error), str(error)
    leader.__exit__(type(error), error, None)
    assert waits.result(LIMIT).code == 1 and words.split("HOST2")[0] in waits.result(LIMIT).why


def test_a_launcher_names_its_own_difference_from_the_leader(enter):
    hosts = addresses(2)
    enter(hosts, 0)
    (waiting,) = begin(enter(hosts, 1, token="other", settle_seconds=0.5))
    assert f"{hosts[0]} (it was started with other options)" in str(waiting.exception(LIMIT))


def test_a_launcher_that_differs_later_is_logged_and_the_job_continues(enter, capsys):
    hosts = addresses(3)
    leader = enter(hosts, 0, fewest=2, allowed=(3, 2), join_seconds=0.0, settle_seconds=0.5)
    other = enter(hosts, 1)
    assert meet(leader, other) == [Round(1, (0, 1))] * 2
    enter(hosts, 2, token="other")
    until(lambda: leader._poll[2].line)
    assert not leader.newcomers()
    other.leave()
    interruption(leader)
    (waiting,) = begin(leader)
    shown = []
    warning = f"launchers that cannot take part: {hosts[2]} (it was started with other options)"
    until(lambda: shown.append(capsys.readouterr().out) or warning in "".join(shown))
    assert meet(enter(hosts, 1)) == [Round(2, (0, 1))] == [waiting.result(LIMIT)]


def test_a_second_launcher_of_a_host_is_named(enter):
    hosts = addresses(2)
    enter(hosts, 0)
    with pytest.raises(
        ClusterError, match=rf"{hosts[0]}: port \d+ is taken by pid {os.getpid()} .* another port, such as --hosts="
    ):
        enter(hosts, 0)


def test_without_an_allowed_number_of_hosts_there_is_no_agreement(enter):
    with pytest.raises(ConfigError, match=r"at least 2 and at most 2.*Allowed: 4, 1\. Change --nnodes"):
        enter(addresses(2), 0, fewest=2, allowed=(4, 1))


def test_too_few_hosts_or_no_leader_are_errors(enter):
    hosts = addresses(3)
    with pytest.raises(ClusterError) as error:
        enter(hosts, 0, fewest=2, wait_seconds=1.0).next_round(lambda: False)
    assert "1 of at least 2 hosts are ready. Run the same command on each host" in str(error.value)
    assert f"{hosts[1]} (connection refused), {hosts[2]} (connection refused)" in str(error.value)
    with pytest.raises(ClusterError) as error:
        enter(addresses(2), 1, wait_seconds=1.0).next_round(lambda: False)
    assert "(connection refused), which leads. Run the same command there" in str(error.value)


@contextlib.contextmanager
def peer(behave):
    """Serves connections by a function, at the port that is returned."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)

        def serve():
            while not over.is_set():
                with contextlib.suppress(OSError), server.accept()[0] as connection:
                    connection.settimeout(LIMIT)
                    behave(connection, over)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            thread.join()


def send_slowly(connection, over):
    while not over.wait(0.1):
        connection.sendall(b"x")


def send_without_end(connection, over):
    while not over.is_set():
        connection.sendall(b"tfdist-launch " * 1000)


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (lambda connection, over: over.wait(LIMIT), "no answer"),
        (lambda connection, over: connection.sendall(b"tfdist-launch hosts=01"), "no answer"),
        (lambda connection, over: connection.sendall(b"SSH-2.0-OpenSSH\r\n"), "another program answers there"),
        (lambda connection, over: connection.sendall(b"tfdist-launch round=\xff\n"), "another program answers there"),
        (send_slowly, "another program answers there"),
        (send_without_end, "another program answers there"),
    ],
    ids=["half_open", "cut", "ssh", "garbage", "slow", "endless"],
)
def test_a_peer_that_is_no_launcher_delays_nobody(enter, behave, reason):
    with peer(behave) as address:
        hosts = [*addresses(2), address]
        leader, other = enter(hosts, 0, join_seconds=0.5), enter(hosts, 1)
        assert meet(leader, other) == [Round(1, (0, 1))] * 2
        until(lambda: leader._poll[2].reason == reason)
        end(leader, other)


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b"])
def test_a_name_that_does_not_resolve_delays_nobody(enter, name):
    hosts = [*addresses(1), f"{name}:2221"]
    assert meet(enter(hosts, 0, join_seconds=0.5)) == [Round(1, (0,))]


def test_peers_that_send_or_do_not_read_keep_no_one_from_the_line(enter):
    hosts = addresses(2)
    leader = enter(hosts, 0)
    host, port = hosts[0].split(":")
    with contextlib.ExitStack() as connections:
        for request in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096):
            connection = connections.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(OSError):
                connection.sendall(request)
        assert meet(leader, enter(hosts, 1)) == [Round(1, (0, 1))] * 2


def test_lines_are_read_as_they_were_written():
    line = launcher_lines.Line("0" * 16, "1" * 16, 1, "2" * 16, "ended", "3" * 16, 4, ((0, "5" * 16),), -9, 6, 7, True)
    for why in ("", "worker:1 lost", "a\nb\x1b[2J"):
        sent = dataclasses.replace(line, why=why).encode()
        read = launcher_lines.decode_line(sent)
        assert sent.count(b"\n") == 1 and read.why.isprintable() and read.encode() == sent
        assert dataclasses.replace(read, why="") == line


def test_the_launcher_listens_at_the_port_before_the_tasks():
    assert [launcher_lines.launcher_address(each) for each in ("host1:2222", "[::1]:3000")] == [
        "host1:2221",
        "[::1]:2999",
    ]


class Program:
    """A launcher in a process of its own (`agreement_program.py`)."""

    def __init__(self, folder: pathlib.Path, hosts: list[str], me: int, wait_seconds: float = LONG):
        self._out = folder / f"out{me}-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "tests.launch.agreement_program", ",".join(hosts), str(me), str(wait_seconds)]
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT)}
            )

    @property
    def shown(self) -> str:
        return self._out.read_text()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def until(self, text: str) -> None:
        until(lambda: re.search(text, self.shown) or self.process.poll() is not None)
        assert re.search(text, self.shown), self.shown

    def end(self) -> None:
        self.process.kill()  # also a stopped process
        self.process.wait()


@pytest.fixture
def programs(tmp_path):
    """Starts the launchers of several hosts as processes."""
    started: list[Program] = []

    def start(hosts, *mes, **limits):
        started.extend(new := [Program(tmp_path, hosts, me, **limits) for me in mes])
        return new

    yield start
    for program in started:
        program.end()


def test_a_launcher_that_is_killed_is_named_and_one_in_its_place_joins(enter, programs):
    hosts = addresses(3)
    leader = enter(hosts, 0)
    killed, other = programs(hosts, 1, 2)
    assert meet(leader) == [Round(1, (0, 1, 2))]
    for each in (killed, other):
        each.until("number=1")
    killed.signal(signal.SIGKILL)
    lost = interruption(leader)
    assert f"the launcher of {hosts[1]} has ended" in lost.why
    leader.report("failed", why=lost.why)
    other.until(re.escape(lost.why))
    programs(hosts, 1)
    assert meet(leader) == [Round(2, (0, 1, 2))]
    leader.finish(3)
    other.until(r"Done\(code=3")


def test_a_stopped_launcher_holds_up_nobody_and_joins_again_when_it_continues(enter, programs):
    hosts = addresses(3)
    leader = enter(hosts, 0, fewest=2, join_seconds=1.0)
    stopped, other = programs(hosts, 1, 2)
    await_ready(leader, 1, 2)
    assert meet(leader) == [Round(1, (0, 1, 2))]
    stopped.until("number=1")
    stopped.signal(signal.SIGSTOP)
    until(lambda: leader._poll[1].reason == "no answer")
    assert not leader.members_failed(), "its tasks may train"
    leader.report("failed", why="worker:0 lost")
    assert meet(leader) == [Round(2, (0, 2))]
    stopped.signal(signal.SIGCONT)
    stopped.until("has opened round 2|has ended round 1")
    until(leader.newcomers)
    assert leader.newcomers() == (1,)
    leader.report("failed", why="the job grows")
    await_ready(leader, 1, 2)
    assert meet(leader) == [Round(3, (0, 1, 2))]
    stopped.signal(signal.SIGSTOP)
    leader.finish(3, "ended by the test")
    other.until(r"Done\(code=3, why='ended by the test'\)")


def test_a_member_that_does_not_read_of_its_round_is_named(enter, stack, monkeypatch):
    monkeypatch.setattr(agreement_lib, "_REPORT_EVERY", 0.5)
    hosts = addresses(2)
    line = Agreement(hosts, 1, 1, [1], LONG, "same")._line
    stack.callback(launcher_lines.LineServer(hosts[1], "the launcher", lambda: line).close)
    leader = enter(hosts, 0, join_seconds=0.5)
    await_ready(leader, 1)
    assert meet(leader) == [Round(1, (0, 1))]
    assert interruption(leader).why == f"the launcher of {hosts[1]} (ready) does not start its tasks"


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "connection refused"), (signal.SIGSTOP, "no answer")])
def test_the_loss_of_the_leader_ends_the_others_with_a_message(enter, programs, number, reason):
    hosts = addresses(2)
    other = enter(hosts, 1, wait_seconds=3.0)
    (leader,) = programs(hosts, 0)
    until(lambda: other._leader)
    assert meet(other) == [Round(1, (0, 1))]
    leader.signal(number)
    other.report("failed")
    (waiting,) = begin(other)
    assert f"Waited 3 s for the launcher of {hosts[0]} ({reason}), which leads" in str(waiting.exception(LIMIT))
