"""Signs of work: what sleeps has none; what computes, writes or sends has some."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

from tests.multiprocess.waiting import wait_until
from tfdist.runtime.report import work

SECONDS = 0.3


@pytest.fixture
def other():
    """Returns a function that runs another one again and again in a thread of a name, and yields when it has begun."""
    over, threads = threading.Event(), []

    def start(function, name):
        begun = threading.Event()

        def run():
            while not over.is_set():
                begun.set()
                function()

        threads.append(threading.Thread(target=run, name=name, daemon=True))
        threads[-1].start()
        assert begun.wait(10)

    yield start
    over.set()
    for thread in threads:
        thread.join(10)


def observe():
    before = work.threads()
    time.sleep(SECONDS)
    return before, work.threads(), SECONDS


def without_main(threads):
    """The main thread observes, which is work."""
    return {tid: each for tid, each in threads.items() if tid != threading.main_thread().native_id}


def worked(names):
    before, after, seconds = observe()
    kept = {thread.native_id for thread in threading.enumerate() if thread.name in names}
    before, after = ({tid: each for tid, each in part.items() if tid in kept} for part in (before, after))
    assert after, "the thread is counted"
    return work.has_worked(before, after, seconds)


def test_a_thread_that_waits_does_not_work(other):
    lock = threading.Event()
    other(lambda: lock.wait(60), "waits")
    wait_until(lambda: not worked(["waits"]), 20)
    lock.set()


def test_a_thread_that_sends_works(other):
    def send():
        left, right = socket.socketpair()
        with left, right:
            left.send(b"1")
            right.recv(1)
        time.sleep(0.01)

    other(send, "sends")
    assert worked(["sends"])


def test_a_thread_that_writes_works(other, tmp_path):
    def write():
        (tmp_path / "file").write_bytes(b"1")
        time.sleep(0.01)

    other(write, "writes")
    before = {tid: each.bytes for tid, each in work.threads().items()}
    wait_until(lambda: any(each.bytes > before.get(tid, 0) for tid, each in without_main(work.threads()).items()), 20)


def test_threads_of_tfdist_are_not_counted(other):
    other(lambda: time.sleep(0.01), "tfdist-hangs")
    tid = next(thread.native_id for thread in threading.enumerate() if thread.name == "tfdist-hangs")
    assert tid not in work.threads()


def test_the_main_thread_computes():
    before, begun = work.threads(), time.monotonic()
    main = threading.main_thread().native_id
    np.linalg.svd(np.ones((300, 300)))
    time.sleep(0.01)
    assert work.has_computed(before, work.threads(), time.monotonic() - begun, main)
    assert not work.has_computed(before, before, 1.0, main)


def test_bytes_of_connections_are_counted():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as left:
        right, _ = server.accept()
        before = work.sent_and_received()
        left.sendall(bytes(100_000))
        received = 0
        while received < 100_000:
            received += len(right.recv(1 << 20))
        wait_until(lambda: work.sent_and_received() - before >= 200_000, 20)  # sent by one end, received by the other
        right.close()
