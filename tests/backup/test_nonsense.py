"""A storage that answers nonsense: a training ends with the right weights, or with one sentence."""

from __future__ import annotations

import os
import signal

import keras
import numpy as np
import pytest
import s3fs

import tfdist
from tests.backup import nonsense
from tests.helpers.launched_job import until
from tests.helpers.reused_model import ReusedModel
from tfdist.backup import search
from tfdist.runtime.folders import storage as urls

X = np.arange(96, dtype=np.float32).reshape(24, 4) / 96
URL = "s3://backups/run"


@pytest.fixture(scope="module")
def reused():
    trainer = tfdist.Trainer("one_device")
    with trainer.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return ReusedModel(model)


@pytest.fixture(scope="module")
def server():
    with nonsense.serving() as (port, answers), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "the-key-of-the-tests")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-the-tests")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        patch.setattr(urls, "PAUSES", (0.01,))
        patch.setattr(search, "PATIENCE", 0.05)
        patch.setattr(search, "RETRY_EVERY", 0.05)
        patch.setattr(search, "SHARED_WITHIN", 0.2)
        patch.setattr(search, "PROBE_PAUSES", (0.01,))
        s3fs.S3FileSystem.clear_instance_cache()
        yield answers
        s3fs.S3FileSystem.clear_instance_cache()


def train(reused, epochs=1, callbacks=()):
    model = reused.reset()
    keras.utils.set_random_seed(1)
    model.fit(X, np.ones((24, 1), np.float32), batch_size=8, epochs=epochs, verbose=0, callbacks=[*callbacks])
    return model.get_weights()


@pytest.fixture(scope="module")
def right(reused):
    return train(reused)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 200))])
def test_training_ends_with_the_right_weights_or_one_sentence(reused, right, server, seed):
    server.restart(seed)
    for _ in range(2):  # a start, and a restart
        backup = tfdist.BackupAndRestore(URL, save_freq=2, delete_checkpoint=False)
        try:
            weights = train(reused, callbacks=[backup])
        except (tfdist.BackupError, tfdist.ConfigError) as e:
            assert "\n" not in str(e) and str(e).endswith((".", "?")), e
            continue
        for found, wanted in zip(weights, right, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_an_outage_is_one_warning(reused, server, capsys):
    class Outage(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            server.share = 1.0 if 1 <= epoch < 5 else 0.0

    server.restart(0)
    server.share = 0.0
    server.only = (500, b"")
    try:
        backup = tfdist.BackupAndRestore(URL, save_freq=2, delete_checkpoint=False)
        train(reused, 7, [backup, Outage()])
    finally:
        server.only = None
    output = capsys.readouterr().out
    assert output.count("could not be uploaded") == 1, output
    assert output.count("trying again") <= 1, output
    assert output.count(f"backups are uploaded to {URL} again") == 1, output


@pytest.mark.parametrize("saved", [True, False])
def test_after_sigterm_the_exit_code_says_whether_a_backup_is_whole(reused, server, capsys, saved):
    class Preempted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1 and saved:
                until(lambda: "run/step-2/manifest.json" in server.objects)
            if epoch == 1 or not saved:
                server.share = 1.0
            if epoch == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    server.restart(0)
    server.share = 0.0
    server.only = (500, b"")
    # This process goes on, and the end of the grace would end it.
    backup = tfdist.BackupAndRestore(URL, save_freq=2, delete_checkpoint=False, grace_seconds=36_000)
    try:
        if saved:
            with pytest.raises(SystemExit, match="75"):
                train(reused, 7, [backup, Preempted()])
            assert "could not be uploaded" in capsys.readouterr().out
        else:
            with pytest.raises(tfdist.BackupError, match="There is no other backup"):
                train(reused, 7, [backup, Preempted()])
    finally:
        server.only = None
