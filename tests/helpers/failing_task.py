"""A user's task that fails where its options say, on worker 1."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import time

from tfdist.tasks.base import Task


@dataclasses.dataclass
class Options:
    """Where to fail ("import", "build", "step", "kill" or nowhere), and a file for the moment of it."""

    where: str = ""
    moment: str = ""


class Failing(Task):
    """One dense layer."""

    Options = Options

    def _fail(self, where):
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        if self.options.where != where or task["index"] != 1:
            return
        pathlib.Path(self.options.moment).write_text(str(time.time()))
        if where == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"failing in {where}, on purpose")

    def build_model(self):
        import keras

        self._fail("build")

        class FailsLater(keras.Sequential):
            def __init__(inner, *args, **kwargs):
                super().__init__(*args, **kwargs)
                inner.calls = 0

            def make_train_function(inner, force=False):
                super().make_train_function(force)
                step = inner.train_function

                def counted(iterator):
                    inner.calls += 1
                    if inner.calls == 3:
                        self._fail("step")
                        self._fail("kill")
                    return step(iterator)

                inner.train_function = counted

        return FailsLater([keras.Input((4,)), keras.layers.Dense(1)])

    def compile_arguments(self):
        return {"loss": "mse"}

    def steps_per_epoch(self, global_batch_size):
        return 50

    def train_data(self, context, global_batch_size, seed):
        import numpy as np

        from tfdist import data

        return data.epochs(
            (np.ones((64, 4), np.float32), np.ones((64, 1), np.float32)), context, global_batch_size, seed
        )


if "FAIL_AT_IMPORT" in os.environ and json.loads(os.environ.get("TF_CONFIG", '{"task": {}}'))["task"].get("index") == 1:
    pathlib.Path(os.environ["FAIL_AT_IMPORT"]).write_text(str(time.time()))
    raise RuntimeError("failing in import, on purpose")
