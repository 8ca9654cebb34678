"""The number of workers of an elastic job: what a loss and a backup change."""

import pytest

from tfdist.launch.sizes import Sizes


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("fewest", "most", "replicas", "expected"),
    [
        (1, 4, 0, [4, 2, 1]),
        (2, 4, 0, [4, 2]),
        (3, 4, 0, [4]),
        (1, 6, 0, [6, 3, 2, 1]),
        (1, 4, 12, [4, 3, 2, 1]),
        (1, 3, 3, [3, 1]),
    ],
)
def test_each_loss_leads_to_the_next_number_that_divides_the_replicas(fewest, most, replicas, expected):
    sizes = Sizes(fewest, most, replicas)
    seen = [sizes.workers]
    while sizes.lost(step=len(seen), may_restart=False):
        seen.append(sizes.workers)
    assert seen == expected


def test_a_job_starts_again_with_as_many_workers_until_the_time_to_join_is_over():
    sizes = Sizes(1, 4, join_seconds=30, clock=(clock := Clock()))
    for now, step, continues_with in ((0, 10, 4), (20, 10, 4), (40, 15, 4), (69, 15, 4), (71, None, 2)):
        clock.now = now
        sizes.lost(step, may_restart=True)
        assert sizes.workers == continues_with, now


def test_a_job_grows_after_a_new_backup_and_waits_longer_after_each_growth_in_vain():
    sizes = Sizes(1, 4)
    step = 10

    def backups_until_growth():
        nonlocal step
        sizes.started()
        assert not sizes.should_grow(step)  # the backup that the job continues from
        for count in range(1, 20):
            step += 10
            for _ in range(3):
                if sizes.should_grow(step):
                    return count
        return 0

    sizes.lost(step, may_restart=False)
    assert (sizes.workers, backups_until_growth()) == (2, 1)
    for expected in (2, 4):
        sizes.grow()
        assert sizes.is_full
        sizes.lost(None, may_restart=False)  # before a step
        assert (sizes.workers, backups_until_growth()) == (2, expected)
    sizes.grow()
    sizes.lost(step + 5, may_restart=False)
    assert backups_until_growth() == 1


def test_a_job_grows_as_far_as_there_are_places():
    sizes = Sizes(1, 4)
    places = 1
    sizes.available = lambda: places
    sizes.fit(places)
    sizes.started()
    found = []
    for step, places in ((0, 4), (10, 1), (20, 3), (30, 4)):  # noqa: B007 (`available` reads it)
        if sizes.should_grow(step):
            sizes.grow()
        found.append(sizes.workers)
    assert found == [1, 1, 2, 4]
