"""The recipes of docs/extending.md work: each example is run as it stands there."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys
import tomllib

import numpy as np
import pytest

from tests.docs.pages import blocks
from tfdist import TrainConfig

EXAMPLES = {
    re.match(r"# (\S+)\n", block.text)[1]: block.text for block in blocks("python") if block.page == "docs/extending.md"
}


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """Returns a function that imports an example as a file of its own."""
    folder = tmp_path_factory.mktemp("examples")

    def load(path):
        name = f"example_{pathlib.PurePath(path).stem}"
        file = folder / f"{name}.py"
        file.write_text(EXAMPLES[path])
        spec = importlib.util.spec_from_file_location(name, file)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    for path in EXAMPLES:
        sys.modules.pop(f"example_{pathlib.PurePath(path).stem}", None)


def test_every_recipe_has_an_example():
    folders = {path.rpartition("/")[0].removeprefix("tfdist/") for path in EXAMPLES}
    assert folders == {"compression", "cluster/resolvers", "strategies", "monitoring", "", "cluster/jobs"}


def test_the_compressor_sums(example):
    import tensorflow as tf

    from tfdist.collectives.communicator import InProcessCommunicator

    compressor = example("tfdist/compression/scaled_fp16.py").ScaledFP16()
    group = InProcessCommunicator(2)
    values = np.random.default_rng(0).standard_normal((2, 40, 30)).astype(np.float32)
    contexts = group.contexts(tf.constant(0, tf.int64))
    results = group.run(
        [compressor.exchange([tf.constant(v)], [()], c) for v, c in zip(values, contexts, strict=True)], 0
    )
    for result in results:
        np.testing.assert_allclose(
            result.sums[0], values.sum(0), atol=3 * 2**-11 * np.abs(values).max()
        )  # float16 has 11 bits
    assert compressor.bytes_per_step([(512, 512)], num_replicas=2) == 512 * 512 * 2


def test_a_configuration_names_the_compressor_and_checks_its_options(example):
    from tfdist import ConfigError, compression
    from tfdist.config import CompressionConfig

    name = f"{example('tfdist/compression/scaled_fp16.py').__name__}:ScaledFP16"
    made = compression.create(CompressionConfig(name, scale=8.0, warmup_steps=100))
    assert made.description == "Warmup(ScaledFP16(scale=8.0), steps=100)"
    with pytest.raises(ConfigError, match=r"compression\.scale must be more than 0\. Received: 0\.0"):
        compression.create(CompressionConfig(name, scale=0.0))


def test_the_resolver_finds_the_cluster(example):
    from tfdist.cluster.resolvers.environment import Environment

    resolve = example("tfdist/cluster/resolvers/mysched.py").resolve
    found = resolve(Environment({"MYSCHED_HOSTS": "a,b", "MYSCHED_RANK": "1", "TFDIST_PORT": "99"}))
    assert found == (["a:99", "b:99"], 1)


def test_the_entry_points_name_the_examples(example):
    from tfdist.config import registry

    (block,) = [block for block in blocks("toml") if block.page == "docs/extending.md"]
    groups = tomllib.loads(block.text)["project"]["entry-points"]
    assert groups.keys() == set(registry.PLUGIN_GROUPS.values())
    folders = {"circle": "", "scaled_fp16": "tfdist/compression/", "mysched": "tfdist/cluster/resolvers/"}
    for entries in groups.values():
        ((name, target),) = entries.items()
        module, attribute = target.removeprefix("my_package.").split(":")
        assert name.partition(".")[0] == module
        assert hasattr(example(f"{folders[module]}{module}.py"), attribute)


def test_the_job_trains_what_it_is_told(example):
    from tfdist.cluster.jobs.job import Job

    script = example("tfdist/cluster/jobs/mysched.py").script
    text = script(TrainConfig(), pathlib.PurePath("/x"), ["--config=digits"], Job("digits"))
    assert "name=digits tasks=1 " in text and "-m tfdist.train --config=digits\n" in text


@pytest.fixture(scope="module")
def trained(example):
    """Returns the history and the callback of a training of the task's example under the strategy's."""
    import tensorflow as tf

    from tfdist import Trainer, create_strategy

    own = example("tfdist/strategies/last_device.py")
    strategy = create_strategy(f"{own.__name__}:last_device")
    task_class = example("circle.py").Circle
    task = task_class(task_class.Options(units=16))
    slowest = example("tfdist/monitoring/slowest_step.py").SlowestStep()
    trainer = Trainer(strategy)
    with trainer.scope():
        model = task.build_model()
        model.compile("adam", **task.compile_arguments())
    assert isinstance(strategy, tf.distribute.OneDeviceStrategy) and strategy.traits is own.last_device.traits
    data = lambda context: task.train_data(context, 64, 0)  # noqa: E731
    steps = task.steps_per_epoch(64)
    return trainer.fit(model, data, epochs=8, steps_per_epoch=steps, callbacks=[slowest], verbose=0), slowest


def test_the_feature_shows_the_norm_of_the_reduced_gradient(example):
    import keras

    from tfdist import Trainer

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)).astype("float32"), rng.normal(size=(12, 1)).astype("float32")
    name = f"{example('gradient_norm.py').__name__}:GradientNorm"
    trainer = Trainer("mirrored", devices=2, features=name)
    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.01), "mse", metrics=["mae"])
    weights = model.get_weights()[0].astype(float)
    norms = []
    for rows in (slice(0, 4), slice(4, 8), slice(8, 12)) * 2:
        grad = 2 * x[rows].T @ (x[rows] @ weights - y[rows]) / 4
        norms.append(np.linalg.norm(grad))
        weights -= 0.1 * grad * min(1, 0.01 / norms[-1])
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["gradient_norm"], norms[2::3], rtol=1e-5)
    assert history.keys() == {"loss", "mae", "gradient_norm"}  # and those of the model are as without it
    np.testing.assert_allclose(model.get_weights()[0], weights, rtol=1e-5)


def test_an_object_that_is_no_feature_is_refused(example):
    from tfdist import ConfigError, create_strategy

    with pytest.raises(
        ConfigError, match=r"strategy.features must name subclasses of tfdist.Feature. Received: .*circle"
    ):
        create_strategy("mirrored", features=f"{example('circle.py').__name__}:Circle")
    with pytest.raises(ConfigError, match=r"The module of feature 'no_such.module:X' cannot be found"):
        create_strategy("mirrored", features="no_such.module:X")


def test_the_task_learns_under_the_strategy(trained):
    loss = trained[0].history["loss"]
    assert loss[-1] < 0.95 * loss[0]


def test_the_callback_keeps_its_state(trained):
    again = type(trained[1])()
    again.load_state_dict(trained[1].state_dict())
    assert again.seconds == trained[1].seconds > 0
