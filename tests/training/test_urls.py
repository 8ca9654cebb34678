"""Models and curves at URLs: `memory://` in this process."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tfdist
from tfdist.errors import ConfigError
from tfdist.monitoring import TensorBoard
from tfdist.runtime.files import WriteError
from tfdist.runtime.folders import storage

X, Y = np.ones((8, 3), np.float32), np.ones((8, 2), np.float32)


@pytest.fixture
def url(request):
    url = f"memory://{request.node.name.partition('[')[0]}"
    yield url
    if storage.exists(url):
        storage.remove_tree(url)


@pytest.fixture(scope="module")
def trainer():
    return tfdist.Trainer("one_device")


@pytest.fixture
def model(trainer):
    with trainer.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    return model


def fetch(url, folder):
    for path in storage.list_files(url):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        storage.download(f"{url}/{path}", str(folder / path))
    return folder


def test_models_at_urls_load_as_local_ones(trainer, model, url, tmp_path):
    trainer.save(model, f"{url}/model.keras")
    model.save_weights(f"{url}/model.weights.h5")
    trainer.export(model, f"{url}/1")
    trainer.export(model, f"{url}/1")  # replaces it
    folder = fetch(url, tmp_path)
    expected = model.predict(X, verbose=0)
    np.testing.assert_allclose(keras.models.load_model(folder / "model.keras").predict(X, verbose=0), expected)
    served = tf.saved_model.load(str(folder / "1"))
    np.testing.assert_allclose(served.serve(X), expected, rtol=1e-6)
    model.load_weights(folder / "model.weights.h5")
    with pytest.raises(FileExistsError):
        trainer.save(model, f"{url}/model.keras", overwrite=False)


@pytest.mark.parametrize("fails_at", ["variables.data", "fingerprint.pb", "saved_model.pb"])
def test_an_interrupted_upload_leaves_no_model_that_loads(trainer, model, url, monkeypatch, fails_at):
    trainer.export(model, f"{url}/1")
    upload = storage.upload

    def failing(local, target):
        if fails_at in target:
            raise storage.StorageError(f"{target} cannot be written: a test")
        upload(local, target)

    monkeypatch.setattr(storage, "upload", failing)
    for number in (1, 2):
        with pytest.raises(WriteError, match="cannot be written: a test"):
            trainer.export(model, f"{url}/{number}")
        assert not storage.exists(f"{url}/{number}/saved_model.pb")


def test_curves_at_a_url_are_those_of_a_local_folder(trainer, model, url, tmp_path):
    weights = model.get_weights()
    read = []
    for folder in (url, str(tmp_path / "local")):
        model.set_weights(weights)
        trainer.fit(model, X, Y, epochs=2, batch_size=2, verbose=0, callbacks=[TensorBoard(folder, update_freq=1)])
        local = fetch(url, tmp_path / "copy") if folder == url else tmp_path / "local"
        events = EventAccumulator(str(local / "train"), {"tensors": 0}).Reload()
        tags = [tag for tag in events.Tags()["tensors"] if tag.endswith("_loss")]
        read.append({tag: [(e.step, *e.tensor_proto.float_val) for e in events.Tensors(tag)] for tag in tags})
    assert read[0] == read[1] and len(read[0]["batch_loss"]) == 8


def test_a_url_with_credentials_is_an_error_without_them():
    with pytest.raises(ConfigError, match="must not contain credentials") as error:
        TensorBoard("s3://id:verysecret@bucket/logs")
    assert "verysecret" not in str(error.value)
