"""Runs cases of public reports. Arguments: strategy (none under parameter servers), output folder, kind, names of cases."""

import sys

import tfdist
from tests.multiprocess import harness
from tests.multiprocess.reports import cases

words = sys.argv[1:]
strategy = words.pop(0) if words[0] in cases.ALL else cases.SERVERS
out, kind, *names = words

has_two_devices = strategy in (cases.MIRRORED, cases.TWO_EACH)
trainer = tfdist.Trainer(strategy.partition(" ")[0], **({"devices": 2} if has_two_devices else {}))
world = cases.World(trainer, strategy, out)
known = cases.of_kind(kind)
harness.store(out, world.rank, {name: cases.evaluate(known[name], world) for name in names})
