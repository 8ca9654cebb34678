"""When a failed run is started again."""

from __future__ import annotations

from tfdist.launch.restart_policy import RestartPolicy


class Clock:
    """Seconds that pass only when told to."""

    now = 100.0

    def __call__(self):
        return self.now


def test_the_budget_is_spent_failure_by_failure():
    restarts = RestartPolicy(2)
    assert [restarts.failed(step) for step in (5, 9)] == ["", ""]
    assert restarts.failed(12) == "all 2 restarts are spent"
    assert (restarts.spent, restarts.total) == (2, 2)
    assert RestartPolicy(0).failed(5) == "no restarts are allowed"


def test_steady_progress_refills_it():
    clock = Clock()
    restarts = RestartPolicy(1, refill_seconds=60, clock=clock)
    assert restarts.failed(5) == ""
    clock.now += 61
    assert restarts.failed(80) == ""
    assert (restarts.spent, restarts.total) == (1, 2)
    clock.now += 61
    assert restarts.failed(80) == "all 1 restarts are spent", "time without progress is none"
    clock.now += 30
    assert restarts.failed(90), "nor is progress that has only begun"


def test_three_failures_at_the_same_step_are_the_steps_fault():
    restarts = RestartPolicy(9)
    assert [restarts.failed(step) for step in (4, 7, 7)] == [""] * 3
    assert restarts.failed(7) == "it has failed 3 times at step 7"
    restarts = RestartPolicy(9)
    assert [restarts.failed(step) for step in (7, 7, 8, 7, 7)] == [""] * 5


def test_failures_before_any_step_spend_restarts_alone():
    restarts = RestartPolicy(4)
    assert [restarts.failed(None) for _ in range(4)] == [""] * 4
    assert restarts.failed(None) == "all 4 restarts are spent"


def test_restarts_without_progress_wait_longer_and_longer():
    restarts = RestartPolicy(99)
    delays = []
    for step in (5, 5, None, None, None, None, None, None, 6):
        restarts.failed(step)
        delays.append(restarts.delay)
    assert delays == [0, 1, 2, 4, 8, 16, 30, 30, 0]
