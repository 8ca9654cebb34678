"""Runs one script as its user would: `python -m tests.scripts NAME`."""

import sys

import keras

import tfdist
from tests import scripts

trainer = tfdist.Trainer("multi_worker_mirrored")
keras.utils.set_random_seed(1)
scripts.load()[sys.argv[1]].run(trainer.scope)
