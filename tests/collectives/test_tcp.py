"""Streams of bytes between ranks over TCP: of any size, over short reads, over connections that break, beside strangers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import random
import shutil
import socket
import subprocess
import time

import numpy as np
import pytest

from tests.collectives.arithmetic import check, same
from tests.collectives.folder_store import open_store
from tests.helpers import tiers
from tests.helpers.launched_job import until
from tfdist.collectives import tcp, tcp_door
from tfdist.collectives.tcp_door import Door, Hello
from tfdist.errors import ConfigError

SECONDS = 60  # limit of a wait that never takes so long


@contextlib.contextmanager
def connected(folder, size, seconds=SECONDS, store=open_store):
    """Connects ranks, each of which is a thread; yields a function that calls a function with each rank's transport, all at once.

    Args:
        seconds: The limit of a wait for another rank.
        store: Returns a rank's store, of a folder, the rank and `size`.
    """
    folder.mkdir(exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(size) as pool:

        def connect(rank):
            return tcp.connect(store(folder, rank, size), ["127.0.0.1:1"] * size, range(size), seconds)

        transports = list(pool.map(connect, range(size)))

        def on_all(function):
            return list(pool.map(function, transports))

        on_all.transports = transports
        try:
            yield on_all
        finally:
            for transport in transports:
                transport.close()


def stream(transport, peer):
    return transport.streams.of[peer]


@pytest.mark.parametrize("size", tiers.cases([2, 3, 4, 8], quick=[2, 3]))
def test_arrays_of_any_size_arrive_over_short_reads_and_slow_readers(tmp_path, size):
    with connected(tmp_path / "store", size) as on_all:
        for transport in on_all.transports:
            for peer in range(size):
                if peer != transport.rank:
                    stream(transport, peer).connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        def compare(transport):
            for number, elements in enumerate([0, 1, 7, 5001]):
                if transport.rank == number % size:
                    time.sleep(0.05)  # the others' bytes fill its buffers
                for method in ("sum", "largest", "all_gather", "all_to_all"):
                    check(transport, method, (elements,), np.float32, [number])

        on_all(compare)


def test_ten_million_numbers_are_summed_to_the_bit(tmp_path):
    with connected(tmp_path / "store", 2) as on_all:
        values = np.arange(10**7, dtype=np.float32)
        on_all(lambda transport: same(transport.all_reduce(values + transport.rank), values + (values + 1)))


def shut(broken):
    with socket.socket(fileno=os.dup(broken.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def destroy(broken):
    """As a firewall that has forgotten the connection: it is reset, and bytes on their way are lost."""
    ends = [f"{host}:{port}" for host, port in (broken.getsockname(), broken.getpeername())]
    subprocess.run(["ss", "-K", "src", ends[0], "dst", ends[1]], capture_output=True, timeout=SECONDS)


@pytest.mark.parametrize(("size", "cut"), tiers.cases([(2, destroy), (2, shut), (4, destroy), (3, shut)], quick=2))
def test_sums_go_on_over_connections_that_break(tmp_path, size, cut):
    if cut is destroy and (os.geteuid() or not shutil.which("ss")):
        pytest.skip("ss, which destroys connections, needs root and iproute2: make system-deps")
    cuts = 0
    with connected(tmp_path / "store", size) as on_all, concurrent.futures.ThreadPoolExecutor(1) as pool:

        def sums(transport):
            draw = np.random.default_rng(5)
            for number in range(24):
                elements = int(draw.choice([3, 5000, 1_000_000]))
                check(transport, "sum", (elements,), np.float32, [number])
                check(transport, "all_to_all", (1 + elements % 999,), np.int16, [number])

        done = pool.submit(on_all, sums)
        chance = random.Random(1)
        while not done.done():
            transport = on_all.transports[chance.randrange(size)]
            peer = chance.choice([rank for rank in range(size) if rank != transport.rank])
            before = stream(transport, peer)
            with contextlib.suppress(OSError, AttributeError):  # it is broken already
                cut(before.connection)
                cuts += 1
            time.sleep(chance.random() / 10)
        done.result()
    assert cuts > 5


def test_garbage_floods_and_silent_strangers_change_nothing(tmp_path):
    with connected(tmp_path / "store", 2) as on_all, contextlib.ExitStack() as stack:
        host, port = (tmp_path / "store/job-door-0").read_text().rsplit(":", 1)

        def stranger(content):
            found = stack.enter_context(socket.create_connection((host, int(port)), SECONDS))
            found.sendall(content)
            return found

        silent = stranger(b"t")
        wrong = stranger(Hello(tcp_door.LOST, 1, 1).pack(bytes(tcp_door.TOKEN_BYTES)))
        garbage = stranger(os.urandom(10**4))
        flood = [stranger(b"") for _ in range(200)]
        for number in range(3):
            on_all(lambda transport, number=number: check(transport, "sum", (10**5,), np.float32, [number]))
        for each in (wrong, garbage, flood[0]):
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
        silent.settimeout(0.01)
        on_all(lambda transport: same(transport.all_reduce(np.ones(3)), np.full(3, 2.0)))


def test_a_start_does_not_wait_for_a_stranger(tmp_path):
    strangers = []

    def store_with_strangers(*arguments):
        store = open_store(*arguments)

        def write(key, text):
            if "door/" in key:  # nobody else knows this address yet
                host, port = text.rsplit(":", 1)
                strangers.append(socket.create_connection((host, int(port))))  # says nothing
            store.write(key, text)

        return dataclasses.replace(store, write=write)

    began = time.monotonic()
    with connected(tmp_path / "store", 2, store=store_with_strangers) as on_all:
        on_all(lambda transport: check(transport, "sum", (9,), np.float32, [1]))
    assert time.monotonic() - began < SECONDS / 2
    assert len(strangers) == 2
    for each in strangers:
        each.close()


def test_calls_that_differ_are_named(tmp_path):
    with connected(tmp_path / "store", 2) as on_all:

        def differ(transport):
            with pytest.raises((RuntimeError, ConnectionError)) as raised:
                if transport.rank:
                    transport.all_gather(np.ones(5))
                else:
                    transport.all_reduce(np.ones(7))
            return str(raised.value)

        said = on_all(differ)
    assert any(
        "another collective" in text and "all_gather of 5" in text and "all_reduce of 7" in text for text in said
    )
    assert all("called another collective" in text or "has given up after an error" in text for text in said), said


def test_arrays_of_one_size_and_two_shapes_differ(tmp_path):
    with connected(tmp_path / "store", 2) as on_all:

        def differ(transport):
            with pytest.raises((RuntimeError, ConnectionError)):
                transport.all_reduce(np.ones((2, 3) if transport.rank else (3, 2)))

        on_all(differ)


def test_a_rank_that_ends_well_is_no_loss(tmp_path):
    with connected(tmp_path / "store", 2) as on_all:

        def end(transport):
            transport.all_reduce(np.ones(3))
            if transport.rank:
                transport.close()
                return ""
            with pytest.raises(ConnectionError) as raised:
                transport.all_reduce(np.ones(3))
            return str(raised.value)

        assert on_all(end)[0] == "rank 1 has ended"


def test_a_transport_that_is_closed_ends_its_own_call(tmp_path):
    with connected(tmp_path / "store", 2) as on_all, concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(on_all.transports[0].all_reduce, np.ones(10**6))
        until(lambda: stream(on_all.transports[0], 1).waits)
        on_all.transports[0].close()
        with pytest.raises(ConnectionError):
            waiting.result(SECONDS)


def test_a_rank_that_does_not_take_part_is_named(tmp_path):
    late = pytest.raises(TimeoutError, match=r"rank 1 did not take part within 0\.5 seconds")
    with connected(tmp_path / "store", 2, seconds=0.5) as on_all, late:
        on_all.transports[0].all_reduce(np.ones(10**6))


def test_who_cannot_be_reached_is_told_to_all(tmp_path):
    (tmp_path / "store").mkdir()

    def connect(rank):
        store = open_store(tmp_path / "store", rank, 3)

        def read(key, seconds):
            return "127.0.0.1:1" if rank == 2 and key.endswith("door/0") else store.read(key, seconds)

        with pytest.raises(tcp.NoTransportError) as raised:
            tcp.connect(dataclasses.replace(store, read=read), ["127.0.0.1:1"] * 3, range(3))
        return str(raised.value)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        said = list(pool.map(connect, range(3)))
    assert len(set(said)) == 1
    assert said[0].startswith("rank 2 cannot reach rank 0 at 127.0.0.1:1: "), said


def test_doors_take_the_ports_that_the_environment_allows(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        monkeypatch.setenv(tcp_door.PORTS, str(port))
        with pytest.raises(OSError, match=f"no port of TFDIST_PORTS={port} is free"):
            Door("127.0.0.1")
    door = Door("127.0.0.1")
    assert door.address == f"127.0.0.1:{port}"
    door.close()


@pytest.mark.parametrize("text", ["30000-", "0", "70000", "30010-30000", "a"])
def test_ports_that_are_none_are_named(text):
    with pytest.raises(ConfigError, match="TFDIST_PORTS must be a port or two with a hyphen between"):
        tcp_door.allowed_ports(text)
