"""A task of `tools.bench.startup`: `tfdist.train`, which notes when it is where. Arguments: folder, options as JSON."""

import contextlib
import json
import pathlib
import sys
import time

import psutil

folder, tasks = sys.argv[1], json.loads(sys.argv[2])["tasks"]
moments = {"started": psutil.Process().create_time()}

from tfdist.cluster import preflight  # noqa: E402 (the clock runs)
from tfdist.cluster.resolvers import discovery  # noqa: E402 (the clock runs)
from tfdist.commands import train  # noqa: E402 (the clock runs)
from tfdist.training.trainer import Trainer  # noqa: E402

moments["imported"] = moments["asked"] = moments["there"] = moments["serving"] = time.time()
passed, fit = preflight.startup_barrier, Trainer.fit


@contextlib.contextmanager
def timed(*args, **kwargs):
    moments["asked"] = time.time()
    with passed(*args, **kwargs):
        moments["there"] = time.time()
        yield
    moments["serving"] = time.time()


def fitting(self, *args, callbacks=(), **kwargs):
    import keras

    first = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: moments.setdefault("stepped", time.time())
    )
    moments["fitting"] = time.time()
    return fit(self, *args, callbacks=[*callbacks, first], **kwargs)


preflight.startup_barrier, Trainer.fit = timed, fitting
name = "multi_worker_mirrored" if tasks > 1 else "one_device"
options = [f"--config.strategy.name={name}", "--config.epochs=1", "--config.steps_per_epoch=2"]
if tasks == 1:
    options.append("--config.cluster.source=none")  # as if it were started without the launcher
code = train.main(["train", "--config=configs/digits.py", f"--workdir={folder}/run", *options])
index = found.task.index if (found := discovery.resolve()) else 0
ends = {
    "imports": ("started", "imported"),
    "preflight": ("asked", "there"),
    "server start": ("there", "serving"),
    "tracing and first step": ("fitting", "stepped"),
    "all": ("started", "stepped"),
}
parts = {part: moments[end] - moments[begin] for part, (begin, end) in ends.items()}
pathlib.Path(folder, f"results-{index}.json").write_text(json.dumps(parts))
sys.exit(code)
