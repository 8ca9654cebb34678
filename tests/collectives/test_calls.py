"""A call of a transport ends in time, whatever the transport does."""

import threading

import pytest

from tfdist.collectives.calls import Calls
from tfdist.errors import ClusterError


@pytest.fixture
def hanging():
    """A function that returns when the test has ended."""
    over = threading.Event()
    yield over.wait
    over.set()


def test_the_limit_of_all_calls_ends_one(hanging):
    patient = Calls(timeout_seconds=3600)
    assert patient(lambda: 7) == 7 and not patient.ended
    calls = Calls(timeout_seconds=0.01)
    with pytest.raises(ClusterError, match=r"took longer than 0.01 s \(strategy.timeout_seconds\)"):
        calls(hanging)
    with pytest.raises(ClusterError, match="took longer"):  # the transport is in no known state
        calls(lambda: 7)
    assert calls.ended


def test_a_call_may_have_a_limit_of_its_own(hanging):
    with pytest.raises(ClusterError, match=r"took longer than 0.01 s"):
        Calls()(hanging, timeout_seconds=0.01)
    with pytest.raises(ClusterError, match=r"took longer than 0.01 s"):
        Calls(timeout_seconds=3600)(hanging, timeout_seconds=0.01)


def test_who_waits_is_told_why_another_thread_has_ended_it():
    calls, waits = Calls(), threading.Event()
    begun = threading.Event()

    def hang():
        begun.set()
        waits.wait()

    def end():
        begun.wait(60)
        calls.abort("worker:1 is lost.")

    thread = threading.Thread(target=end)
    thread.start()
    try:
        with pytest.raises(ClusterError, match=r"^worker:1 is lost\.$"):
            calls(hang)
    finally:
        waits.set()
        thread.join()


def test_what_a_function_raises_ends_all_calls():
    calls = Calls()
    with pytest.raises(ValueError, match="no room"):
        calls(lambda: (_ for _ in ()).throw(ValueError("no room")))
    with pytest.raises(ClusterError, match="no room"):
        calls(lambda: 7)
