"""The network laboratory: hosts on links of a rate, and nothing left over."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import uuid

import pytest

from tests.helpers.launched_job import until
from tools import netlab
from tools.netlab.lab import limit

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(bool(netlab.missing()), reason=netlab.missing()),
    pytest.mark.timeout(120),
]


def fastest(enough, *arguments):
    """Returns the bits a second of the fastest of three transfers, or more: other work makes them slower; nothing may make them faster."""
    speeds = []
    while len(speeds) < 3 or (max(speeds) < enough and len(speeds) < 15):
        speeds.append(netlab.goodput(*arguments) * 8)
    return max(speeds)


@pytest.mark.full
@pytest.mark.parametrize(("rate", "bits"), [("100mbit", 100e6), ("1gbit", 1e9)])
def test_links_are_as_fast_as_their_rate_in_both_directions(rate, bits):
    size = int(bits / 8 * 2)
    with netlab.Lab(2, rate) as lab:
        first, second = lab.hosts
        for sender, receiver in ((first, second), (second, first)):
            assert fastest(0.9 * bits, sender, receiver, size) == pytest.approx(bits, rel=0.1)
            before = sender.counters()[1], receiver.counters()[0]
            netlab.goodput(sender, receiver, size)
            sent, received = sender.counters()[1] - before[0], receiver.counters()[0] - before[1]
            assert size < sent < 1.1 * size and size < received < 1.1 * size


def test_small_messages_are_limited_too():
    """After a pause, in which a link could save up what it lets pass at once: of a compressor's messages all would be free."""
    with netlab.Lab(2, "100mbit") as lab:
        assert 0.5 * 100e6 < fastest(0.5 * 100e6, *lab.hosts, 200_000) < 1.2 * 100e6


def test_a_message_takes_as_long_as_the_delay():
    answer = "import socket; c = socket.create_server(('', 5000)).accept()[0]; [c.sendall(c.recv(1)) for _ in range(5)]"
    ask = """
import socket, sys, time
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
for _ in range(5):
    began = time.monotonic()
    connection.sendall(b"?")
    connection.recv(1)
    print(time.monotonic() - began)
"""
    with netlab.Lab(2, "1gbit", delay=15.0) as lab:
        first, second = lab.hosts
        with subprocess.Popen(second.on(sys.executable, "-c", answer)) as process:
            asked = subprocess.run(
                first.on(sys.executable, "-c", ask, second.address), check=True, capture_output=True, timeout=60
            )
        assert process.returncode == 0
    # Other work makes answers later; nothing may make them earlier.
    assert 0.03 <= min(map(float, asked.stdout.split())) < 0.06


def interfaces():
    return {line.partition(":")[0].strip() for line in pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]}


@pytest.fixture
def nothing_is_left(monkeypatch):
    """Of all that has been started here; others make namespaces, too."""
    mark = f"TEST_NETLAB={uuid.uuid4()}"
    monkeypatch.setenv(*mark.split("="))
    links = interfaces()

    def left():
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark.encode() in path.read_bytes():
                    yield path
            except OSError:
                pass

    yield
    until(lambda: not list(left()))
    until(lambda: interfaces() <= links)  # the machine's own interfaces are as they were; others may just make some


@pytest.mark.parametrize("entered", [True, False])
def test_an_exception_leaves_nothing(nothing_is_left, entered):
    with pytest.raises(ZeroDivisionError), netlab.Lab(3) as lab:
        sleeper = subprocess.Popen(lab.hosts[0].on("sh", "-c", "echo in; exec sleep 1000"), stdout=subprocess.PIPE)
        if entered:
            assert sleeper.stdout.readline() == b"in\n"
        raise ZeroDivisionError
    # One that is just about to enter finds the host gone.
    assert sleeper.wait(60) in ([-signal.SIGKILL] if entered else [-signal.SIGKILL, 1])
    sleeper.stdout.close()


def lab(*command, hosts=2, rate=""):
    return subprocess.Popen(
        [sys.executable, "-m", "tools.netlab", f"--hosts={hosts}", f"--rate={rate}", "--", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("nsenter --net=${TFDIST_NETNS%,*} true", 0)],
)
def test_a_commands_end_is_the_laboratorys(nothing_is_left, script, code):
    with lab("sh", "-c", script) as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == code
    assert re.search(r"10\.77\.0\.2 sent [0-9.]+ MB, received [0-9.]+ MB", output)


@pytest.mark.parametrize(
    ("number", "whole"),
    [
        (signal.SIGINT, True),  # as Ctrl-C, which reaches the command, too
        (signal.SIGINT, False),
        (signal.SIGTERM, True),
        (signal.SIGTERM, False),
        (signal.SIGKILL, True),
        (signal.SIGKILL, False),
    ],
)
def test_a_signal_leaves_nothing(nothing_is_left, number, whole):
    script = "nsenter --net=${TFDIST_NETNS%,*} sleep 1000 & echo ready; wait"
    with lab("bash", "-c", script) as process:
        assert process.stdout.readline() == "ready\n"
        (os.killpg if whole else os.kill)(process.pid, number)
        if number == signal.SIGKILL:  # nobody is there to end what runs on the hosts
            subprocess.run(["pkill", "-KILL", "-g", str(process.pid)], check=False)
        process.communicate(timeout=100)
    assert process.returncode


def test_two_stand_side_by_side(nothing_is_left):
    with netlab.Lab(2) as first, netlab.Lab(2) as second:
        assert [host.address for host in first.hosts] == [host.address for host in second.hosts]
        for each in (first, second):
            assert netlab.goodput(*each.hosts, 10_000_000) > 0
        before = [sum(host.counters()) for host in second.hosts]
        netlab.goodput(*first.hosts, 10_000_000)
        for host, counted in zip(second.hosts, before, strict=True):  # but what hosts say of themselves
            assert sum(host.counters()) - counted < 10_000, "none of it has crossed the other's links"


def test_the_launchers_tasks_run_on_the_hosts(tmp_path, nothing_is_left):
    script = "import json, os; print(os.environ['TF_CONFIG'], flush=True); os.system('ip -4 -o address show eth0'); print(os.sched_getaffinity(0))"
    launch = [sys.executable, "-m", "tools.netlab.launch", "--workers=2", f"--log_dir={tmp_path}"]
    with lab(*launch, "--", sys.executable, "-c", script) as p:
        output, _ = p.communicate(timeout=110)
    assert p.returncode == 0, output
    cores = [
        set(re.findall(r"\d+", re.findall(r"\{([\d, ]+)\}", (tmp_path / f"worker-{n}.log").read_text())[-1]))
        for n in (0, 1)
    ]
    assert all(cores) and (os.cpu_count() == 1 or not cores[0] & cores[1])
    for number in range(2):
        log = (tmp_path / f"worker-{number}.log").read_text()
        assert f"10.77.0.{number + 1}/24" in log
        assert re.search(r'"worker": \["10\.77\.0\.1:\d+", "10\.77\.0\.2:\d+"\]', log)


def test_a_task_ends_when_all_have_received_its_part(tmp_path, nothing_is_left):
    """One has all at once, and a link of its own on which the other still waits for two seconds."""
    slow = f"nsenter --net=${{TFDIST_NETNS#*,}} {limit('eth0', '20mbit')}"
    program = f"{sys.executable} -m tests.helpers.last_collective 2000000"
    launch = f"{sys.executable} -m tools.netlab.launch --workers=2 --log_dir={tmp_path} -- {program}"
    with lab("bash", "-c", f"{slow} && exec {launch}") as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert output.count("reduced") == 2


@pytest.mark.full
@pytest.mark.timeout(200)
def test_heartbeats_may_wait_behind_gradients(tmp_path, nothing_is_left):
    """On a slow link for longer than the 5 s that TensorFlow gives them, after which it ends the training."""
    launch = [sys.executable, "-m", "tools.netlab.launch", "--workers=2", f"--log_dir={tmp_path}"]
    with lab(
        *launch, "--", sys.executable, "-m", "tests.helpers.last_collective", "15000000", rate="20mbit"
    ) as process:
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    assert output.count("reduced") == 2


def test_who_may_not_is_told(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match="network namespaces need root"), netlab.Lab(2):
        pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((0, ""), "hosts must be"), ((2, "100"), "rate must be"), ((2, "1gbit", -1.0), "delay must be")],
)
def test_bad_arguments_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        netlab.Lab(*arguments)


def test_a_namespace_that_is_not_there_is_named():
    done = subprocess.run(
        [sys.executable, "-m", "tools.netlab.launch", "--netns=no-such", "--", "true"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "netns: 'no-such' cannot be used: nsenter: cannot open /run/netns/no-such" in done.stderr


def test_no_namespace_at_all_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "tools.netlab.launch", "--netns=,", "--", "true"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "netns must name network namespaces" in done.stderr
