"""Steps in threads, as the scheduler runs them: what their staleness is, and which ones a limit delays."""

import contextlib
import threading

import pytest

from tfdist.engine import RunningMeans
from tfdist.parameter_server.staleness import Staleness


class Step:
    """A step in a thread, which begins if it may, and ends when it is told."""

    def __init__(self, staleness, measured):
        self.asked, self.begun, self._may_end = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(staleness, measured), daemon=True)
        self._thread.start()

    def _run(self, staleness, measured):
        self.asked.set()
        with contextlib.suppress(ZeroDivisionError), staleness.step(measured):
            self.begun.set()
            self._may_end.wait(60)
            if self._fails:
                raise ZeroDivisionError

    def waits(self):
        """Whether the step has not begun 0.3 s after its thread asked for it."""
        return self.asked.wait(60) and not self.begun.wait(0.3)

    def end(self, fails=False):
        assert self.begun.wait(60)
        self._fails = fails
        self._may_end.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_a_step_counts_the_updates_that_came_while_it_ran():
    staleness, measured = Staleness(None), RunningMeans()
    assert staleness.report() is None
    slow = Step(staleness, measured)
    slow.begun.wait(60)
    for _ in range(3):
        Step(staleness, measured).end()
    Step(staleness, measured).end(fails=True)
    slow.end()
    assert staleness.report() == {"mean": 0.75, "max": 3}
    assert measured.take() == {"ps/staleness": 0.75}


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_waits_while_it_would_be_one_too_many_for_another(fails):
    staleness, measured = Staleness(2), RunningMeans()
    slow = Step(staleness, measured)
    assert slow.begun.wait(60)
    for _ in range(2):
        Step(staleness, measured).end()
    late = Step(staleness, measured)
    assert late.waits(), "the third beside the slow one"
    slow.end(fails)
    late.end()
    assert staleness.report()["max"] == (0 if fails else 2)


def test_without_staleness_steps_run_one_after_the_other():
    staleness, measured = Staleness(0), RunningMeans()
    first = Step(staleness, measured)
    assert first.begun.wait(60)
    second = Step(staleness, measured)
    assert second.waits()
    first.end()
    second.end()
    assert staleness.report() == {"mean": 0.0, "max": 0}
