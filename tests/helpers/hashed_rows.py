"""An embedding of unknown ids as a plain loop: a dict of rows, a dict of counts."""

import collections

import numpy as np


def batches_of_ids(examples, columns):
    """Returns two ids for each example, few of which are frequent, and targets."""
    rng = np.random.default_rng(5)
    names = rng.integers(-(2**62), 2**62, 30)
    ids = names[np.minimum(rng.geometric(0.1, (examples, 2)) - 1, 29)]
    return ids, rng.standard_normal((examples, columns)).astype("float32")


class Dict:
    """Trains rows by SGD on the mean squared error of each element. `first` returns the first row of an id."""

    def __init__(self, capacity, columns, min_count, unknown, first):
        self.capacity = capacity
        self.min_count = min_count
        self.unknown = np.array(unknown, "float64")
        self.first = first
        self.rows = {}
        self.counts = collections.Counter()
        self.seen = {}
        self.steps = 0

    def train(self, ids, y, rate):
        self.steps += 1
        for number, count in sorted(collections.Counter(ids.ravel().tolist()).items()):
            limit = self.capacity * (1 if self.min_count == 1 else 2)
            if number not in self.counts and len(self.counts) == limit:
                continue
            self.counts[number] += count
            self.seen[number] = self.steps
            waits = number not in self.rows and self.counts[number] >= self.min_count
            if waits and len(self.rows) < self.capacity:
                self.rows[number] = np.array(self.first(number), "float64")
        slopes = 2 * (self.look_up(ids) - y) / y.size
        for number, slope in zip(ids.ravel().tolist(), slopes.reshape(-1, y.shape[-1]), strict=True):
            row = self.rows.get(number, self.unknown)
            row -= rate * slope

    def look_up(self, ids):
        rows = [self.rows.get(number, self.unknown) for number in np.ravel(ids).tolist()]
        return np.reshape(rows, (*np.shape(ids), -1))

    def evict(self):
        """Removes the ids of the greatest age, down to 90 % of the ids with a row, and of those without."""
        order = sorted(self.counts, key=lambda number: (self.seen[number], number))
        for group in ([n for n in order if n in self.rows], [n for n in order if n not in self.rows]):
            for number in group[: max(0, len(group) - int(0.9 * self.capacity))]:
                self.rows.pop(number, None)
                del self.counts[number], self.seen[number]
