"""The status of a TrainJob: a server receives the progress of a fit while it runs."""

from __future__ import annotations

import http.server
import importlib.util
import json
import threading

import keras
import numpy as np
import pytest

import tfdist
from tfdist.runtime.report import kubeflow

SECONDS = 60  # the longest wait


def fit(*callbacks):
    trainer = tfdist.Trainer("one_device")
    with trainer.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((12, 1))
    return trainer.fit(model, x, x, batch_size=4, epochs=2, callbacks=list(callbacks), verbose=0)


@pytest.mark.parametrize("prefix", ["KUBEFLOW_TRAINER_SERVER", "KUBEFLOW_TRAINER_STATUS"])
def test_a_server_receives_the_progress_while_a_model_trains(tmp_path, monkeypatch, prefix):
    received = []
    has_step = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append((self.path, self.headers["Authorization"], body["trainerStatus"]))
            if metrics()["step"] == "3":
                has_step.set()
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    def metrics():
        return {each["name"]: each["value"] for each in received[-1][2]["metrics"]}

    def wait(epoch, logs):
        assert has_step.wait(SECONDS), "no post within an epoch"

    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setattr(kubeflow, "POST_EVERY", 0.05)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(f"{prefix}_URL", f"http://127.0.0.1:{server.server_address[1]}/trainjobs/x/status")
        monkeypatch.setenv(f"{prefix}_TOKEN", str(tmp_path / "token"))
        history = fit(keras.callbacks.LambdaCallback(on_epoch_end=wait))
        server.shutdown()
    path, token, status = received[-1]
    assert (path, token) == ("/trainjobs/x/status", "Bearer secret")
    assert metrics() == {"epoch": "2", "step": "6", "loss": f"{history.history['loss'][-1]:.4g}"}
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)
    if importlib.util.find_spec("kubeflow_trainer_api"):
        from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest as Request

        for _, _, each in received:
            Request.model_validate({"trainerStatus": each}, strict=False)


def test_a_training_goes_on_without_the_server(monkeypatch, caplog):
    monkeypatch.setattr(kubeflow, "POST_EVERY", 0.01)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:1/status")
    assert len(fit().history["loss"]) == 2
    warnings = [each for each in caplog.messages if "cannot write http://127.0.0.1:1/status: " in each]
    assert len(warnings) == 1
