"""The own time of a task, by which batches are divided and slow workers are named."""

import types

from tfdist.collectives import own_time


def test_measured_times_between_executions_stand_for_those_that_were_not_measured(monkeypatch):
    now = 0.0
    monkeypatch.setattr(own_time, "time", types.SimpleNamespace(perf_counter=lambda: now))
    own = own_time.OwnTime()

    def execute(seconds_before):
        nonlocal now
        now += seconds_before
        own.execute(lambda: own.seconds.assign_add(1.0), trains=True)

    for _ in range(2):
        execute(5)  # nothing has begun
        execute(3)
        own.skip()  # as at the end of an epoch
        execute(7)
        own.skip()
        assert own.take() == 3 * 1.0 + 3 * 3
