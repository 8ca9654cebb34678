"""The private names of Keras and TensorFlow that tfdist leans on: says which seam a release has moved."""

import concurrent.futures
import inspect
import random
import re
import unittest.mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.losses import loss as losses
from keras.src.trainers import compile_utils, data_adapters
from keras.src.trainers import epoch_iterator as keras_epochs
from keras.src.trainers.data_adapters import generator_data_adapter, tf_dataset_adapter
from tensorflow.python.checkpoint import graph_view
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    cross_device_ops,
    cross_device_utils,
    mirrored_strategy,
    values,
)
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context

import tfdist
from tfdist.backup import unsaved_randomness
from tfdist.compat import (
    call_stack,
    keras_distribution,
    keras_internals,
    keras_loops,
    keras_losses,
    keras_metrics,
    tf_cluster,
    tf_internals,
    tf_strategies,
)
from tfdist.data import graph as graph_lib
from tfdist.data import python_generators, random_state
from tfdist.parameter_server import strategy as strategy_lib
from tfdist.parameter_server import worker_step
from tfdist.replicas import random_seeds
from tfdist.strategies import model_methods, startup

# The releases with which all tests of this file have passed. Each name that `tfdist/compat` uses was there in all of them, but for those of
# `ONLY_IN`, whose accessors know where the others keep the same, or do without.
CHECKED = {"KERAS": ("3.13", "3.14", "3.15", "3.16"), "TF": ("2.18", "2.19", "2.20", "2.21", "2.22")}
ONLY_IN = {"KERAS_CALL_LOSS": ("3.16",), "KERAS_ADAPTER_EPOCH": ("3.16",)}
ACCESSORS = (
    call_stack,
    keras_distribution,
    keras_internals,
    keras_loops,
    keras_losses,
    keras_metrics,
    tf_cluster,
    tf_internals,
)
NAMES = sorted({name for module in ACCESSORS for name in vars(module) if re.match("(KERAS|TF)_", name)})
RUNNING = {"KERAS": ".".join(keras.__version__.split(".")[:2]), "TF": ".".join(tf.__version__.split(".")[:2])}


def test_each_name_was_checked_with_each_release():
    for library, release in RUNNING.items():
        assert release in CHECKED[library], f"add {release} to CHECKED once the other tests of this file pass with it"
        first, end = startup.TESTED_VERSIONS[{"KERAS": "keras", "TF": "tensorflow"}[library]]
        ends = [tuple(map(int, each.split("."))) for each in (first, CHECKED[library][-1], end)]
        assert CHECKED[library][0] == first
        assert (ends[1][0], ends[1][1] + 1) == ends[2]
    assert len(NAMES) > 50
    for name, releases in ONLY_IN.items():
        assert name in NAMES
        assert set(releases) < set(CHECKED[name.partition("_")[0]])
    for name, owner in {
        "KERAS_CALL_LOSS": compile_utils.CompileLoss,
        "KERAS_ADAPTER_EPOCH": keras_loops.ArrayDataAdapter(np.zeros((2, 1))),
    }.items():
        attribute = next(getattr(module, name) for module in ACCESSORS if hasattr(module, name))
        assert hasattr(owner, attribute) == (RUNNING["KERAS"] in ONLY_IN[name]), f"{name} has moved"


@pytest.fixture(scope="module")
def strategy():
    return tfdist.create_strategy("mirrored", devices=2)


def test_keras_builds_a_model_by_a_call_where_its_parts_are_not_built():
    asks = getattr(
        keras.Model, "_get_unbuilt_components", getattr(keras.Model, keras_loops.KERAS_BUILD_BY_CALL)
    )  # since 3.16
    for name in (keras_metrics.KERAS_COMPILED_METRICS, keras_losses.KERAS_COMPILED_LOSS):
        assert f"self.{name}.built" in inspect.getsource(asks), "seam build: Keras builds models elsewhere"


def test_keras_saves_and_trains_by_methods_of_its_model():
    for name in (*model_methods._TRAINING, *model_methods._SAVING):
        assert model_methods.keras_own(name).__module__.startswith("keras."), f"seam own methods: {name} has moved"
    several = collective_all_reduce_strategy.CollectiveAllReduceExtended
    for extended in (mirrored_strategy.MirroredExtended, several):
        source = inspect.getsource(extended)
        assert f"container_strategy.{tf_internals.TF_COLLECTIVE_KEYS}" in source, (
            "seam keys: of a second strategy in one process"
        )
    assert f'getattr(self, "{tf_cluster.TF_SERVES}", False)' in inspect.getsource(several), "seam server: started again"


def test_keras_distribution_calls_functions_of_its_backend():
    moved = "seam distribution: keras.distribution asks elsewhere for devices and processes"
    keras_distribution.install()
    module = inspect.getmodule(keras.distribution.list_devices)
    source = inspect.getsource(module)
    for name in (
        keras_distribution.KERAS_LIST_DEVICES,
        keras_distribution.KERAS_NUM_PROCESSES,
        keras_distribution.KERAS_PROCESS_ID,
        keras_distribution.KERAS_INITIALIZE,
    ):
        assert f"distribution_lib.{name}(" in source, moved
    assert module.distribution_lib is keras_distribution.distribution_lib, moved
    if hasattr(keras.distribution, keras_distribution.KERAS_DEVICE_COUNT):
        assert keras.distribution.get_device_count() == len(keras.distribution.list_devices()), moved
    assert keras.distribution.list_devices() == ["cpu:0", "cpu:1"], moved
    assert not keras.distribution.DataParallel()._is_multi_process, f"{moved}: Keras shards data itself"


def test_weights_of_layers_are_told_from_slots_and_from_variables_of_tensorflow():
    created = []

    def create(next_creator, **kwargs):
        created.append(call_stack.is_creating_keras_weight())
        return next_creator(**kwargs)

    with tf.variable_creator_scope(create):
        layer = keras.layers.Layer()
        weight = layer.add_weight(shape=(), trainable=False)
        assert created == [True], "seam variable creation: Keras creates variables elsewhere"
        keras.optimizers.Adam().build([weight])
        tf.Variable(0.0)
    assert not any(created[1:]), "seam variable creation: optimizers are elsewhere"


def test_who_assigns_a_variable_is_told():
    found = []
    variable = keras.Variable(0.0)
    keras_internals.raw_value(variable).assign = lambda value: found.append(call_stack.is_assigned_by_users())
    variable.assign(1.0)
    variable.assign_add(1.0)
    assert found == [True, True], "seam assigned weights: Keras assigns variables elsewhere"
    adam = keras.optimizers.Adam()
    adam.build([weight := keras.Variable(0.0)])
    keras_internals.raw_value(weight).assign_sub = lambda value: found.append(call_stack.is_assigned_by_users())
    adam.apply([tf.constant(1.0)])
    assert found[2:] == [False], "seam assigned weights: optimizers assign elsewhere"


def test_files_are_written_by_functions_that_are_looked_up_in_their_modules():
    moved = "seam writers: models are written elsewhere"
    for function in (keras.saving.save_model, keras.saving.save_weights):
        source = inspect.getsource(inspect.getmodule(function))
        for module, name in keras_internals.KERAS_WRITERS:
            assert f"{module.__name__.rpartition('.')[2]}.{name}(" in source, moved
            own = getattr(module, name)
            assert [*inspect.signature(getattr(own, "keras_own", own)).parameters][:2] == ["model", "filepath"], moved
    assert "tf.saved_model.save(" in inspect.getsource(keras.export.ExportArchive().write_out), moved
    called = f"{tf_internals.TF_WRITE_SAVED_MODEL}(obj, export_dir, signatures, options)"
    assert called in inspect.getsource(inspect.unwrap(tf.saved_model.save)), moved
    module = tf.Module()
    saver = tf_internals.TrackableSaver(graph_view.ObjectGraphView(module))
    assert getattr(saver, tf_internals.TF_OBJECT_GRAPH).root is module, moved


def test_distributed_variables_do_not_convert_to_numbers_by_themselves():
    moved = "seam numbers: TensorFlow converts distributed variables itself, so make_readable_as_number can go"
    assert not {"__float__", "__int__"} & {name for kind in values.MirroredVariable.__mro__ for name in vars(kind)}, (
        moved
    )


def test_tasks_are_connected_and_functions_registered_by_functions_of_the_binding():
    moved = "seam connect: TensorFlow waits for other tasks elsewhere, with the interpreter's lock held"
    connect, add, remove = (f"pywrap_tfe.{name}(" for name in tf_cluster.TF_WAITING)
    assert connect in inspect.getsource(context.Context.ensure_initialized), moved
    assert connect in inspect.getsource(context.Context.enable_collective_ops), moved
    assert add in inspect.getsource(context.Context.add_c_function), moved
    assert remove in inspect.getsource(context.Context.remove_function), moved


def test_datasets_are_made_of_components_as_nest_tells():
    leaves = tf_internals.dataset_leaves({"x": 1, "y": (2, [3, 4])})
    assert leaves == [1, 2, [3, 4]], "seam components: TensorFlow takes a list for several"
    assert tf_internals.dataset_structure({"x": 1, "y": (2, 3)}, [4, 5, 6]) == {"x": 4, "y": (5, 6)}


def test_checkpoints_are_written_by_one_method():
    moved = "seam checkpoints: tf.train.Checkpoint writes elsewhere"
    assert "self._saver.save(file_prefix=file_prefix, options=options)" in inspect.getsource(tf.train.Checkpoint), moved
    assert "self._saver.restore(save_path=save_path, options=options)" in inspect.getsource(tf.train.Checkpoint), moved
    assert "self._checkpoint._write(" in inspect.getsource(tf.train.CheckpointManager.save), moved
    own = getattr(tf_internals.TrackableSaver.save, "tensorflow_own", tf_internals.TrackableSaver.save)
    assert list(inspect.signature(own).parameters)[1] == "file_prefix", moved


def test_batch_normalization_asks_one_method_for_moments():
    layer = keras.layers.BatchNormalization(synchronized=True)
    assert f"self.{keras_internals.KERAS_MOMENTS}(inputs, mask)" in inspect.getsource(type(layer).call)


def test_tensorflow_takes_a_coordination_service_that_is_configured():
    source = inspect.getsource(collective_all_reduce_strategy.CollectiveAllReduceExtended._initialize_multi_worker)
    assert "if context.context().coordination_service is None:" in source, (
        "seam heartbeats: `multi_worker._extend_heartbeat_timeout`"
    )


def test_keras_names_a_seed_generators_state_as_expected(strategy):
    with strategy.scope():
        seed = keras.random.SeedGenerator(3).state.value
    first, second = strategy.experimental_local_results(seed)
    assert keras_internals.SEED_STATE in seed.name, "seam variable creation: the seed's name has moved"
    assert first.numpy().tolist() == [3, 0]
    assert second.numpy()[0] != 3


def test_statistics_are_told_from_slots_and_metrics(strategy):
    before = len(strategy.statistics.variables())
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
        frozen = keras.layers.Dense(2, trainable=False)
        frozen.build((None, 4))
        model.compile("adam", "mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
    assert len(strategy.statistics.variables()) - before == 2, (
        "seam variable creation: BatchNorm's two, and nothing else"
    )
    for variable in model.non_trainable_variables:
        assert isinstance(variable.value, values.SyncOnReadVariable)
        assert variable.value.aggregation == tf.VariableAggregation.MEAN
    for variable in (*model.trainable_variables, *model.optimizer.variables, *frozen.variables):
        assert isinstance(variable.value, values.MirroredVariable)


def test_optimizers_reduce_gradients_where_expected():
    moved = "seam gradient reduction has moved"
    assert keras_internals.KERAS_REDUCTION in inspect.getsource(
        getattr(keras.optimizers.Optimizer, keras_internals.KERAS_UPDATE_VARIABLES)
    ), moved
    assert call_stack.KERAS_APPLY in inspect.getsource(
        getattr(keras.optimizers.Optimizer, keras_internals.KERAS_UPDATE_VARIABLES)
    ), moved
    assert "distribution.extended" in inspect.getsource(getattr(keras.optimizers.Optimizer, call_stack.KERAS_APPLY)), (
        moved
    )
    assert keras_internals.KERAS_UPDATE in inspect.getsource(keras.optimizers.Optimizer.apply), moved
    assert "self.apply(" in inspect.getsource(keras.optimizers.Optimizer.apply_gradients), moved


def test_optimizers_update_by_the_steps_that_are_repeated_outside_of_the_replicas():
    """`Update` repeats this function but for its conditions: all that it does must be known."""
    source = inspect.getsource(getattr(keras.optimizers.Optimizer, keras_internals.KERAS_UPDATE))
    source = source.replace(
        "_backend_maybe_overwrite_model_variables", keras_internals.KERAS_OVERWRITE
    )  # since 3.16, which calls it
    calls = re.findall(r"self\.(_\w+)", source)
    assert set(calls) == {
        "_iterations",
        "_get_variable_index",
        keras_internals.KERAS_CLIP,
        keras_internals.KERAS_WEIGHT_DECAY,
        keras_internals.KERAS_UPDATE_VARIABLES,
        "_backend_reset_gradient_accumulators",
        "_backend_increment_gradient_accumulators",
        keras_internals.KERAS_TRAINABLE,
        "_accumulated_gradients",
        keras_internals.KERAS_MOVE_AVERAGES,
        keras_internals.KERAS_OVERWRITE,
    }, "seam gradient reduction: Keras updates in another way now"


def test_a_loss_scale_optimizer_looks_at_what_it_is_given():
    source = inspect.getsource(keras.optimizers.LossScaleOptimizer)
    assert "self.inner_optimizer.apply(" in source, "seam gradient reduction: the inner optimizer is called elsewhere"
    assert "self.check_finite" in source, "seam gradient reduction: inf is looked for elsewhere"


def test_accumulators_are_told_from_slots(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        adam = keras.optimizers.Adam(gradient_accumulation_steps=2)
        adam.build(model.trainable_variables)
    moved = "seam variable creation: the accumulators' name has moved"
    assert len(keras_internals.accumulators(adam)) == 2
    for variable in keras_internals.accumulators(adam):
        assert keras_internals.GRADIENT_ACCUMULATOR in variable.name, moved
        assert isinstance(variable.value, values.SyncOnReadVariable), moved


def test_models_make_their_functions_where_the_trainer_does():
    for make in (keras.Model.make_train_function, keras.Model.make_test_function):
        assert keras_internals.KERAS_MAKE_FUNCTION in inspect.getsource(make), "seam step function has moved"


def test_models_build_metrics_and_losses_by_these_methods():
    build = inspect.getsource(getattr(keras.Model, keras_loops.KERAS_BUILD_BY_CALL))
    for name in ("compute_metrics", keras_loops.KERAS_COMPUTE_LOSS):
        assert f"self.{name}," in build, "seam building has moved"


def test_datasets_tell_what_they_are_made_from_and_what_their_functions_draw():
    moved = "seam random state of data: {} has moved"
    generator, flip = tf.random.Generator.from_seed(1), keras.layers.RandomFlip()
    dataset = tf.data.Dataset.from_tensors(tf.zeros([2, 2, 1])).repeat(3)
    assert tf_internals.repeat_count(dataset) == 3, moved.format(tf_internals.TF_COUNT)
    dataset = dataset.map(lambda x: flip(x + generator.normal([2, 2, 1]), training=True), 2, deterministic=False)
    assert len(list(graph_lib.walk(dataset))) == 3, moved.format(tf_internals.TF_INPUTS)
    shapes = [tuple(state.shape) for state in random_state.random_states(dataset)]
    assert sorted(shapes) == [(2,), (3,)], moved.format("a seed generator's or a Generator's state")
    assert tf_internals.is_parallel(dataset), moved.format(tf_internals.TF_PARALLEL)
    assert tf_internals.is_unordered(dataset), moved.format(tf_internals.TF_ORDERED)


def test_traced_functions_tell_their_random_operations():
    traced = tf.function(lambda: tf.random.normal([2]) + tf.map_fn(lambda x: x + tf.random.uniform([]), tf.zeros([2])))
    traced()
    (line,) = unsaved_randomness.step_doubts(traced)
    assert "RandomStandardNormal (test_keras_internals.py:" in line and "RandomUniform" in line
    assert not list(unsaved_randomness.step_doubts(tf.function(lambda: tf.random.stateless_normal([2], [1, 2]))))


def test_keras_keeps_metrics_where_they_are_looked_for():
    moved = "seam metrics: Keras' metrics have moved"
    metric = keras.metrics.PearsonCorrelation(axis=0)
    function, arguments = keras_metrics.function(metric)
    assert keras_metrics.is_keras_code(function) and arguments == {"axis": 0}, moved
    assert keras_metrics.is_keras_code(type(metric).update_state), moved
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[metric])
    assert not keras_metrics.compiled_metrics(model).built, moved
    model.evaluate(np.zeros([2, 1]), np.zeros([2, 1]), verbose=0)
    assert any(each is metric for each in keras_metrics.metrics(model)), moved
    assert "self.build(y_true, y_pred)" in inspect.getsource(compile_utils.CompileMetrics.update_state), moved


def test_iterators_of_several_devices_are_not_autotuned(strategy):
    def tuned(distributed):
        (iterator,) = distributed._iterators
        return [each._dataset.options().autotune.enabled for each in iterator._iterator._device_iterators]

    moved = f"distributed data: {tf_internals.TF_DEVICE_DATASET} has moved"
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))
    assert tuned(iter(data)) == [False, False], moved


def test_tensorflow_averages_losses_by_functions_of_one_module():
    source = inspect.getsource(tf_internals.average_losses.compute_average_loss)
    moved = "seam average loss: TensorFlow divides losses elsewhere"
    assert (
        f"{tf_internals.TF_AVERAGE_ARITHMETIC}.{tf_internals.TF_AVERAGE_DIVISION}(loss, global_batch_size)" in source
    ), moved
    assert source.count(f"{tf_internals.TF_AVERAGE_COUNTED} = ") == 1, moved
    assert tf.nn.compute_average_loss is tf_internals.average_losses.compute_average_loss, moved


def test_keras_sums_and_logs_losses_where_the_step_does():
    moved = "seam step function: losses are summed or logged elsewhere"
    loss = inspect.getsource(keras.Model.compute_loss)
    assert f"self.{keras_losses.KERAS_ADDED_LOSS}(loss)" in loss, moved
    assert f"self.{keras_losses.KERAS_COMPILED_LOSS}(" in loss, moved
    build = inspect.getsource(compile_utils.CompileLoss._build_nested)
    assert f"self.{keras_losses.KERAS_LOSSES}.append(" in build, moved
    assert compile_utils.CompileLoss.Loss._fields[1] == "loss", moved
    assert f"in self.{keras_losses.KERAS_LOSSES}" in inspect.getsource(compile_utils.CompileLoss.call), moved
    reduction = inspect.getsource(losses.reduce_weighted_values)
    assert "apply_mask(" in reduction, "seam losses: masks become weights elsewhere"
    assert "get_keras_mask(y_pred)" in inspect.getsource(keras.losses.Loss.__call__), moved
    masked = keras.layers.Masking()(tf.zeros([2, 3, 1]))
    assert keras_losses.mask(masked) is not None, "seam losses: masks are kept elsewhere"
    for step_method in (keras.Model.train_step, keras.Model.test_step):
        assert f"self.{keras_losses.KERAS_LOSS_TRACKER}.update_state(" in inspect.getsource(step_method), moved


def test_datasets_tell_how_they_are_shuffled():
    dataset = tf.data.Dataset.range(4).shuffle(4, seed=7).batch(2)
    (shuffled,) = tf_internals.inputs(dataset)
    assert tf_internals.dataset_kind(shuffled) == "Shuffle", "data/order: what shuffles has another name"
    numbers = tf_internals.dataset_numbers(shuffled, ["buffer_size", "seed2"])
    assert numbers == {"buffer_size": 4, "seed2": 7}, f"data/order: {tf_internals.TF_NUMBER} names no numbers"


def test_models_tell_their_layers_and_variables_their_strategy(strategy):
    with strategy.scope():
        inner = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
        model = keras.Sequential([keras.Input((2,)), inner])
    assert inner.layers[0] in list(keras_internals.layers(model)), "unsupported: nested layers are told elsewhere"
    assert all(v.value.distribute_strategy is strategy for v in model.weights)


def test_keras_divides_a_loss_by_what_the_strategy_says(strategy):
    """Within `as_one_replica` there is one."""

    def scaled():
        return losses.scale_loss_for_distribution(tf.constant(4.0)), losses.unscale_loss_for_distribution(
            tf.constant(4.0)
        )

    def alone():
        with strategy.as_one_replica():
            return scaled()

    values = [strategy.experimental_local_results(v)[0].numpy() for v in (*strategy.run(scaled), *strategy.run(alone))]
    assert values == [2, 8, 4, 4], "seam step function: Keras divides losses by something else"
    assert strategy.num_replicas_in_sync == 2


def test_keras_decorates_the_methods_that_train():
    moved = "replaced methods: Keras no longer decorates its methods"
    for name in ("fit", "evaluate", "predict"):
        method = keras_internals.inherited_method(name)
        cell = keras_internals.decorated_function_cell(method)
        assert cell is not None, moved
        assert cell.cell_contents.__name__ == name, moved


def test_keras_tells_where_data_come_from():
    moved = "arrays: Keras has renamed its adapters"
    for name in keras_loops.KERAS_SELF_FEEDING:
        assert name in inspect.getsource(data_adapters), moved
    adapter = generator_data_adapter.GeneratorDataAdapter((np.ones((2, size)),) for size in (3, 3, 3))
    assert len(getattr(adapter, keras_loops.KERAS_FIRST_BATCHES)) == 2, moved
    assert len(list(adapter.generator())) == 3, moved
    assert callable(tf_dataset_adapter.make_class_weight_map_fn), moved


class Rows(keras.utils.PyDataset):
    num_batches = 3

    def __getitem__(self, index):
        return np.full((2, 1), index), np.zeros((2, 1))


@pytest.mark.parametrize("num_batches", [3, None])
def test_workers_of_a_py_dataset_are_read_and_stopped_where_expected(num_batches):
    moved = "keras_loops: Keras keeps the workers of a PyDataset elsewhere"
    data = Rows(workers=2, max_queue_size=1)
    data.num_batches = num_batches
    alone, adapter = keras_loops.PyDatasetAdapter(Rows()), keras_loops.PyDatasetAdapter(data)
    assert alone.enqueuer is None and isinstance(adapter.enqueuer, keras_loops.OrderedEnqueuer), moved
    assert f"self.{keras_loops.KERAS_ADAPTER_ITERATOR}," in inspect.getsource(type(adapter).get_tf_dataset), moved
    threads, start = [], keras_loops.OrderedEnqueuer.start

    def start_noted(enqueuer, *args):
        start(enqueuer, *args)
        threads.append((enqueuer.run_thread, enqueuer.future_queue))

    with unittest.mock.patch.object(keras_loops.OrderedEnqueuer, "start", start_noted):
        dataset = keras_loops.adapted_dataset(adapter)
        assert adapter.enqueuer is None and not threads, moved
        for _ in range(2):  # starts again, also where a thread waits for room in the queue
            assert [int(x[0, 0]) for x, _ in dataset.take(2)] == [0, 1], moved
    assert len(threads) == 2 and all(queue.maxsize == 1 for _, queue in threads), moved
    for thread, _ in threads:
        thread.join(60)
        assert not thread.is_alive(), moved


@pytest.mark.parametrize("workers", [1, 2])
def test_items_of_a_py_dataset_are_read_in_a_given_order(workers):
    adapter = keras_loops.PyDatasetAdapter(Rows())
    endless = Rows(workers=workers)
    endless.num_batches = None
    order = [2, 0, 1, 1]
    assert [int(x[0, 0]) for x, _ in keras_loops.read_items(adapter, endless, order)] == order
    dataset = keras_loops.dataset_reading(adapter, lambda: keras_loops.read_items(adapter, endless, order))
    assert [int(x[0, 0]) for x, _ in dataset] == order


def test_items_of_a_py_dataset_are_shuffled_as_by_keras():
    class Numbered(Rows):
        num_batches = 20

    random.seed(5)
    expected = [int(x[0, 0]) for x, _ in keras_loops.PyDatasetAdapter(Numbered(), shuffle=True)._get_iterator()]
    random.seed(5)
    assert keras_loops.shuffle_items(keras_loops.PyDatasetAdapter(Numbered(), shuffle=True)) == expected


def test_releases_of_keras_differ_where_the_loops_here_do():
    for method in (keras.Model.train_on_batch, keras.Model.test_on_batch):
        resets = "self.reset_metrics()" in inspect.getsource(inspect.unwrap(model_methods.keras_own(method.__name__)))
        assert resets == keras_loops.RESETS_METRICS_FOR_BATCH, "keras_loops: metrics are reset in other releases"
    ends = " ".join(inspect.getsource(keras_epochs.EpochIterator.catch_stop_iteration).split())
    assert ends.count("self._interrupted_warning()") == 1
    of_steps = "if self.steps_per_epoch: self._interrupted_warning()" in ends
    assert of_steps != keras_loops.WARNS_OF_UNKNOWN_END, "keras_loops: Keras warns in other releases"


def test_a_batch_that_does_not_fit_is_a_value_error_of_the_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="is incompatible with the layer"):
        keras_loops.build_by_call(model, (tf.zeros([2, 4]), tf.zeros([2, 1])))


def test_keras_tells_what_stays_on_the_chief_of_parameter_servers():
    moved = "parameter servers: Keras creates its counters in another way now"
    created = []

    def creator(next_creator, **kwargs):
        created.append(tuple(kwargs.get(name) for name in ("name", "synchronization", "aggregation")))
        return next_creator(**kwargs)

    with tf.variable_creator_scope(creator):
        keras.metrics.Mean()
        adam = keras.optimizers.Adam()
        keras.random.SeedGenerator(3)
        counters = len(created)
        layer = keras.layers.BatchNormalization()
        layer.build((None, 2))
        adam.build(layer.trainable_variables)
    assert [name for name, *_ in created[:counters]] == [
        "total",
        "count",
        "iteration",
        "learning_rate",
        "seed_generator_state",
    ]
    assert all(strategy_lib.lives_on_chief(*each) for each in created[:counters]), moved
    assert not any(strategy_lib.lives_on_chief(*each) for each in created[counters:]), moved
    assert keras_internals.step_counter(adam).aggregation == "only_first_replica", moved


def test_a_stateless_scope_keeps_what_a_step_assigns():
    moved = "worker_step: Keras' StatelessScope works in another way now"
    metric, layer = keras.metrics.Sum(), keras.layers.Dense(1)
    layer.build((None, 2))
    with worker_step._Scope([(metric.total, tf.constant(5.0))]) as scope:
        metric.update_state(2.0)
        layer.bias.assign([3.0])
        assert layer.bias.numpy() == [3.0], moved
        assert scope.get_current_value(layer.kernel) is keras_internals.raw_value(layer.kernel), moved
    assert scope.state_mapping[id(metric.total)].numpy() == 7, moved
    assert set(scope.state_mapping) == {id(metric.total), id(layer.bias)}, moved
    assert metric.total.numpy() == 0 and layer.bias.numpy() == [0], moved


def test_optimizers_update_one_variable_after_the_other():
    moved = "worker_step: updates are no longer placed on their servers"
    source = inspect.getsource(getattr(keras.optimizers.Optimizer, call_stack.KERAS_APPLY))
    assert f"self.{keras_internals.KERAS_UPDATE_STEP}(grad, var, learning_rate)" in source, moved
    apply = inspect.getsource(getattr(keras.optimizers.Optimizer, keras_internals.KERAS_UPDATE))
    assert f"self.{keras_internals.KERAS_WEIGHT_DECAY}(trainable_variables)" in apply, moved


def test_predict_runs_the_models_predict_function():
    moved = "prediction: predict has moved"
    source = inspect.getsource(keras.Model.make_predict_function)
    assert "self.predict_function is not None and not force" in source, moved
    source = inspect.getsource(keras.Model.predict)
    assert "with epoch_iterator.catch_stop_iteration():" in source and "self.predict_function(data)" in source, moved
    assert "self.predict_function([(x,)])" in inspect.getsource(keras.Model.predict_on_batch), moved


def test_keras_ends_an_epoch_by_the_function_that_drains():
    for loop in (keras.Model.fit, keras.Model.evaluate):
        assert "self._get_metrics_result_or_logs(logs)" in inspect.getsource(inspect.unwrap(loop)), "engine has moved"
    assert "self.get_metrics_result()" in inspect.getsource(keras.Model._get_metrics_result_or_logs)


def test_tensorflows_coordinator_runs_python_functions_in_a_thread_for_each_worker():
    moved = "scheduler: TensorFlow's coordinator works in another way now"
    source = inspect.getsource(cluster_coordinator)
    assert f"self.{tf_cluster.TF_CLUSTER} = Cluster(strategy)" in source, moved
    assert "def schedule(self, function, args, kwargs)" in inspect.getsource(cluster_coordinator.Cluster), moved
    assert "with ops.device(worker.device_name)" in inspect.getsource(cluster_coordinator.Closure.execute_on), moved
    lost = tf.errors.UnavailableError(None, None, "GRPC error information from remote target /job:ps/replica:0/task:1")
    assert tf_cluster.is_server_failure(lost) and not tf_cluster.is_worker_failure(lost), moved
    lost = tf.errors.UnavailableError(None, None, "remote target /job:worker/replica:0/task:1")
    assert tf_cluster.is_worker_failure(lost), moved


def test_optimizers_know_their_strategy(strategy):
    outside = keras.optimizers.SGD()
    with strategy.scope():
        inside = keras.optimizers.SGD()
    assert keras_internals.is_created_in_scope(inside, strategy), "the optimizer's variables have moved"
    assert not keras_internals.is_created_in_scope(outside, strategy)


def test_stock_strategies_still_fail_as_the_cures_suppose(strategy):
    """When this fails, Keras has mended something: a cure may go."""
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with stock.scope():
        layer = keras.layers.BatchNormalization()
        layer.build((None, 2))
        seed = keras.random.SeedGenerator(3).state.value
    assert layer.moving_mean.value.aggregation == tf.VariableAggregation.NONE
    first, second = stock.experimental_local_results(seed)
    assert (first.numpy() == second.numpy()).all()
    with pytest.raises(ValueError, match="Invalid reduction dimension"):
        tf.function(lambda: stock.reduce("MEAN", stock.run(lambda: tf.constant(1.0)), axis=0))()


def test_learning_rate_is_where_agreement_looks():
    assert isinstance(keras.optimizers.SGD(0.1).learning_rate, keras.Variable), "callback_sync: the rate has moved"


def test_tensorflow_tells_whether_a_seed_was_set():
    before = context.global_seed()
    tf.random.set_seed(7)
    assert tf_internals.global_seed() == 7
    tf.random.set_seed(before)


def test_tensorflow_takes_seeds_from_the_traced_graph_and_from_its_context():
    moved = "random_seeds: TensorFlow keeps its seed elsewhere"
    before = context.global_seed()
    tf.random.set_seed(7)
    assert tf_internals.get_seed(tf_internals.seed_holder()) == 7, moved

    @tf.function
    def traced():
        graph = tf_internals.seed_holder()
        assert tf_internals.get_seed(graph) == 7, moved
        tf_internals.set_seed(graph, 8)
        drawn = tf.random.uniform([])
        inner = tf.function(lambda: tf.random.uniform([]))
        inner()
        assert drawn.op.get_attr("seed") == 8, moved
        assert inner.get_concrete_function().graph.get_operations()[1].get_attr("seed") == 8, moved
        assert getattr(graph, tf_internals.TF_OUTER_GRAPH) is not None, moved
        return drawn

    traced()
    tf.random.set_seed(before)


def test_keras_draws_without_a_seed_from_the_generator_of_the_thread(strategy):
    moved = "random_seeds: Keras' global generator has moved"
    generator = random_seeds.GlobalSeedGenerator.for_current_thread(strategy)
    keras.random.uniform([])
    assert random_seeds.GlobalSeedGenerator.for_current_thread(strategy) is generator, moved
    assert generator._own is not None, moved
    keras.utils.set_random_seed(1)
    assert random_seeds.GlobalSeedGenerator.for_current_thread(strategy) is not generator, moved


def test_a_callback_knows_its_hooks():
    for hook in ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"):
        assert hook in vars(keras.callbacks.Callback)


def test_reduce_sums_structures_and_scalars(strategy):
    ones = strategy.run(lambda: tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32))
    assert strategy.reduce("SUM", ones, axis=0).numpy() == 1
    assert strategy.reduce("MEAN", 1.0, axis=0).numpy() == 1, "a train_step may log a Python number"
    summed = strategy.reduce("SUM", {"a": ones, "b": (ones, ones)}, axis=None)
    assert np.array(tf.nest.flatten(summed)).tolist() == [1, 1, 1]


def test_keras_loops_do_in_this_order_what_the_loops_here_do():
    fit = (
        "epoch_iterator = TFEpochIterator(",
        "epoch_iterator.reset()",
        "add_history=True",
        "self.stop_training = False",
        "self.make_train_function()",
        "callbacks.on_train_begin()",
        "self.reset_metrics()",
        "callbacks.on_epoch_begin(epoch)",
        "callbacks.on_train_batch_begin(begin_step)",
        "callbacks.on_train_batch_end(end_step, logs)",
        "if self.stop_training:",
        "self._get_metrics_result_or_logs(logs)",
        "self._should_eval(epoch, validation_freq)",
        "callbacks.on_epoch_end(epoch, epoch_logs)",
        "self.optimizer.finalize_variable_values(",
        "callbacks.on_train_end(logs=training_logs)",
    )
    evaluate = (
        "epoch_iterator.reset()",
        "self.make_test_function()",
        "self.stop_evaluating = False",
        "callbacks.on_test_begin()",
        "self.reset_metrics()",
        "callbacks.on_test_batch_begin(begin_step)",
        "callbacks.on_test_batch_end(end_step, logs)",
        "self._get_metrics_result_or_logs(logs)",
        "callbacks.on_test_end(logs)",
        "self._flatten_metrics_in_order(logs)",
    )
    predict = (
        "self.make_predict_function()",
        "self.stop_predicting = False",
        "callbacks.on_predict_begin()",
        "callbacks.on_predict_batch_begin(begin_step)",
        "self.predict_function(data)",
        "callbacks.on_predict_batch_end(",
        "callbacks.on_predict_end()",
    )
    for name, lines in (("fit", fit), ("evaluate", evaluate), ("predict", predict)):
        source = inspect.getsource(inspect.unwrap(model_methods.keras_own(name)))
        source = re.sub(r"\s+", " ", source).replace("( ", "(").replace(" )", ")")
        for line in lines:
            assert line in source, f"training/loop.py: {name} has another order: {line}"
            source = source[source.index(line) :]
    passes = inspect.getsource(keras_epochs.EpochIterator)
    assert passes.count("iter(self._get_iterator())") == 3, "data/source.py: Keras makes its passes elsewhere"


@pytest.mark.parametrize(
    ("make", "attributes"),
    [
        (lambda: keras.callbacks.EarlyStopping("loss"), keras.callbacks.EarlyStopping),
        (lambda: keras.callbacks.ReduceLROnPlateau("loss"), keras.callbacks.ReduceLROnPlateau),
        (lambda: keras.callbacks.ModelCheckpoint("x.keras"), keras.callbacks.ModelCheckpoint),
        (lambda: keras.callbacks.History(), keras.callbacks.History),
        (lambda: keras.callbacks.TensorBoard("x"), keras.callbacks.TensorBoard),
        (lambda: keras.callbacks.SwapEMAWeights(), keras.callbacks.SwapEMAWeights),
    ],
)
def test_keras_callbacks_remember_what_is_backed_up(make, attributes):
    callback = make()
    source = inspect.getsource(attributes)
    for name in keras_internals.CALLBACK_STATE[attributes]:
        assert f"self.{name}" in source or hasattr(callback, name), f"seam callback state: {name} has moved"
    # What they change while they train, and is not backed up, is set anew when a training begins.
    known = {*keras_internals.CALLBACK_STATE[attributes], "best_epoch", "monitor_op", "csv_file"}
    known |= {
        "_batch_trace_context",
        "_is_tracing",
        "_should_trace",
        "_should_write_train_graph",
        "_train_accumulated_time",
    }
    hooks = "\n".join(
        inspect.getsource(method)
        for name, method in vars(attributes).items()
        if name in ("on_train_batch_end", "on_epoch_end", "_save_model", "_should_save_on_batch", "_is_improvement")
    )
    changed = set(re.findall(r"self\.(\w+) [+-]?= ", hooks))
    assert changed <= known | {"_is_tracing", "_should_trace", "_train_accumulated_time"}, (
        "seam callback state: new state"
    )


def test_collectives_are_launched_as_expected():
    functions = vars(cross_device_utils.CollectiveReplicaLauncher)
    for name in ("_next_instance_key", "_get_ordering_token", "all_reduce_indexed_slices", "can_order_nccl"):
        assert name in functions, f"seam collectives: {name} has gone"
    made = inspect.getsource(functions["__init__"])
    assert all(f"self.{name} =" in made for name in ("_group_key", "_group_size", "_device", "_options"))
    assert f"self.{tf_cluster.TF_LAUNCHERS} = []" in inspect.getsource(cross_device_ops.CollectiveAllReduce.__init__)
    source = inspect.getsource(collective_all_reduce_strategy.CollectiveAllReduceExtended)
    for name in (tf_cluster.TF_CROSS_DEVICE_OPS, tf_cluster.TF_HOST_CROSS_DEVICE_OPS):
        assert f"self.{name} =" in source


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (tf_strategies._Extended, collective_all_reduce_strategy.CollectiveAllReduceExtended),
        (tf_strategies._OrderedAllReduce, cross_device_ops.CollectiveAllReduce),
        (tf_strategies._MirroredExtended, mirrored_strategy.MirroredExtended),
    ],
)
def test_the_sums_of_strategies_are_those_that_are_replaced(own, theirs):
    replaced = [name for name, value in vars(own).items() if callable(value) and name not in ("__init__", "_totals")]
    assert replaced
    for name in replaced:
        here, there = (list(inspect.signature(getattr(cls, name)).parameters) for cls in (own, theirs))
        assert here == there, f"seam strategies: {theirs.__name__}.{name} has moved"


def test_random_operations_of_a_graph_are_counted():
    tf.random.set_seed(1)

    @tf.function
    def draw():
        graph = tf_internals.seed_holder()
        before = tf_internals.get_draws(graph)
        tf.random.normal([])
        return before, tf_internals.get_draws(graph)

    assert [int(count) for count in draw()] == [0, 1], "seam random_seeds: the count of random operations has moved"


def test_variables_are_told_by_their_names():
    moved = "parameter_servers, data_state: the names of variables have moved"
    sgd = keras.optimizers.SGD(0.1)
    sgd.build([keras.Variable(1.0)])
    assert {v.name for v in sgd.variables} >= set(keras_internals.OPTIMIZER_SCALARS), moved
    assert keras.random.SeedGenerator(1).state.name.startswith(keras_internals.SEED_STATE), moved
    assert tf.random.Generator.from_seed(1).state.name.startswith(tf_internals.GENERATOR_STATE), moved


def test_python_functions_of_datasets_are_found():
    generator, one = np.random.default_rng(0), tf.data.Dataset.range(1)
    for dataset in (
        one.map(lambda x: tf.numpy_function(lambda _: generator.random(), [x], tf.float64)),
        one.map(lambda x: tf.py_function(lambda _: generator.random(), [x], tf.float64)),
        tf.data.Dataset.from_generator(
            lambda: iter([generator.random()]), output_signature=tf.TensorSpec([], tf.float64)
        ),
    ):
        called = [each for part in graph_lib.walk(dataset) for each in random_state.python_functions(part)]
        found = python_generators.find_generators(*called)
        assert found == [generator], "data_state: Python functions of datasets have moved"


def test_keras_has_one_generator_for_all_who_bring_none():
    keras_internals.set_global_generator(None)
    keras.random.uniform(())
    found = keras_internals.global_generator()
    assert isinstance(found, keras.random.SeedGenerator), "random_seeds: the global generator has moved"


def test_functions_and_datasets_tell_what_they_hold():
    function = tf.function(lambda x: x + 1)
    function(1.0)
    assert len(tf_internals.traced_functions(function)) == 1, "unsaved_randomness: traces have moved"
    mapped = tf.data.Dataset.range(3).map(lambda x: x + 1)
    assert len(list(tf_internals.dataset_functions(mapped))) == 1, "arrays: functions of datasets have moved"
    assert int(tf_internals.own_batch_size(tf.data.Dataset.range(3).batch(2))) == 2, "arrays: the batch size has moved"


def test_optimizers_clip_where_it_is_done_here():
    assert f"self.{keras_internals.KERAS_CLIP}(" in inspect.getsource(
        keras.optimizers.Optimizer._backend_apply_gradients
    ), "update: clipping has moved"


def test_arrays_without_a_batch_size_have_keras_own():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    sizes = []

    class Sizes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            sizes.append(batch)

    model.fit(
        np.zeros([2 * keras_loops.DEFAULT_BATCH_SIZE, 1]),
        np.zeros([2 * keras_loops.DEFAULT_BATCH_SIZE, 1]),
        callbacks=[Sizes()],
        verbose=0,
    )
    assert sizes == [0, 1], "arguments: the batch size has moved"


def test_keras_own_steps_are_told_by_their_modules():
    moved = "losses: Keras' own steps have moved"
    for own in (
        keras.Model.train_step,
        keras.Model.test_step,
        keras.Model.compute_loss,
        compile_utils.CompileLoss.call,
    ):
        assert own.__module__.startswith(call_stack._STEPS), moved


def test_keras_asks_for_an_epochs_logs_where_they_are_computed():
    assert "self._get_metrics_result_or_logs(logs)" in inspect.getsource(inspect.unwrap(keras.Model.fit)), (
        "execution: logs have moved"
    )


def test_layers_tell_their_own_losses():
    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.sum(x))
            return x

    adds = Adds()
    model = keras.Sequential([keras.Input((2,)), adds, keras.layers.Dense(1, kernel_regularizer="l2")])
    model(np.ones([3, 2]))
    losses = [float(loss) for layer in keras_internals.layers(model) for loss in keras_losses.added_losses(layer)]
    assert losses == [6.0], "losses: losses of layers have moved"
    keras_losses.keep_added_losses_apart(model)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for rows in (3, 1):
            model(np.ones([rows, 2]))
            pool.submit(model, np.ones([5, 2])).result()
            assert [float(loss) for loss in keras_losses.added_losses(adds)] == [2.0 * rows], "losses: kept elsewhere"


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "none", "mean_with_sample_weight"])
@pytest.mark.parametrize("weights", [None, np.array([1.0, 2.0, 0.5], np.float32)])
def test_a_loss_is_reduced_as_by_its_own_call(reduction, weights):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0, reduction=reduction)
    labels, logits = np.array([0, 1, 2]), tf.random.normal([3, 4], seed=1)
    logits._keras_mask = tf.constant([True, True, False])
    value, mask = keras_losses.loss_and_mask(loss, labels, logits, weights)
    np.testing.assert_array_equal(value, loss(labels, logits, weights))
    np.testing.assert_array_equal(mask, [False, True, False])


def test_compiled_models_have_the_parts_that_are_built():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert keras_losses.compiled_loss(model) is None
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(np.ones([2, 2]), np.ones([2, 1]), verbose=0)
    assert keras_metrics.compiled_metrics(model) is not None, "model_building: compiled metrics have moved"
    assert len(keras_losses.losses(keras_losses.compiled_loss(model))) == 1, "losses: the list has moved"
    assert isinstance(keras_losses.loss_tracker(model), keras.metrics.Mean), "losses: the tracker has moved"


def test_optimizers_update_and_number_their_variables_as_expected():
    moved = "update: {} has moved"
    variables = [keras.Variable([3.0, 4.0]), keras.Variable([1.0])]
    sgd = keras.optimizers.SGD(1.0, global_clipnorm=1.0, use_ema=True)
    sgd.build(variables)
    assert [keras_internals.variable_index(sgd, v) for v in variables] == [0, 1], moved.format("the index")
    with pytest.raises(KeyError):
        keras_internals.variable_index(sgd, keras.Variable(1.0))
    assert list(keras_internals.trainable_variables(sgd)) == variables, moved.format("the list of variables")
    keras_internals.update_variables(sgd, [tf.constant([3.0, 4.0]), tf.constant([0.0])], variables)
    np.testing.assert_allclose(variables[0].numpy(), [2.4, 3.2], err_msg=moved.format("clipping or the update"))
    for method in (keras_internals.moving_average_method, keras_internals.overwrite_method):
        method(sgd)(variables)
    assert callable(keras_internals.update_method(sgd)) and callable(keras_internals.clip_method(sgd))


def test_replaced_methods_are_told_and_restored():
    sgd = keras.optimizers.SGD()
    assert not keras_internals.has_replaced_reduction(sgd)
    keras_internals.replace_reduction(sgd, list)
    keras_internals.replace_update(sgd, list)
    keras_internals.replace_clip(sgd, list)
    assert keras_internals.has_replaced_reduction(sgd)
    keras_internals.restore_optimizer_methods(sgd)
    assert not {keras_internals.KERAS_REDUCTION, keras_internals.KERAS_UPDATE, keras_internals.KERAS_CLIP} & set(
        vars(sgd)
    )


def test_strategies_tell_all_replicas_also_within_a_step(strategy):
    with strategy.as_one_replica():
        assert (strategy.num_replicas_in_sync, tf_internals.num_replicas(strategy)) == (1, 2), (
            "the number of replicas has moved"
        )


def test_the_eager_context_tells_what_has_started():
    tf.constant(0)
    assert tf_internals.is_started() and not tf_internals.is_server_running(), "startup: the context has moved"
    with tf.device("CPU:0"):
        assert tf_cluster.current_device().endswith("CPU:0"), "scheduler: the device has moved"
    config = ("configure_coordination_service", "get_config_key_value", "set_config_key_value")
    for name in ("abort_collective_ops", "wait_at_barrier", *config):
        assert callable(getattr(context.context(), name)), f"multi_worker, lost_workers: {name} has moved"


def test_classes_of_tensorflow_are_those_of_the_objects_that_it_makes():
    assert isinstance(tf.constant(0), tf_internals.EagerTensor)
    assert isinstance(tf.IndexedSlices([1.0], [0]), tf_internals.CompositeTensor)
    with tf_internals.FuncGraph("graph").as_default():
        assert not isinstance(tf.constant(0), tf_internals.EagerTensor)
    numbers = tf.data.Dataset.range(3)
    assert isinstance(numbers.cache(), tf_internals.CacheDataset)
    assert isinstance(numbers.repeat(2), tf_internals.RepeatDataset)
    assert isinstance(numbers.shuffle(2), tf_internals.ShuffleDataset)
    assert isinstance(tf.data.Dataset.random(), tf_internals.RandomDataset)
    assert tf_internals.operation_definition("RandomUniform").is_stateful
    assert tf_internals.operation_definition("NoSuchOperation") is None


def test_autograph_converts_as_outside_of_functions_where_it_is_asked_to():
    def sign(x):
        return tf_internals.convert_as_caller(_sign)(x)

    def as_outside(x):
        with tf_internals.autograph_as_outside_of_functions():
            return tf.function(_sign)(x)

    assert tf.function(sign)(tf.constant(3)).numpy() == 1, "base: AutoGraph's context has moved"
    assert tf.function(as_outside, autograph=False)(tf.constant(-3)).numpy() == -1, "worker_dataset: it has moved"
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(sign, autograph=False)(tf.constant(3))


def _sign(x):
    if x > 0:  # noqa: SIM108 (AutoGraph is to convert the statement)
        y = 1
    else:
        y = -1
    return y


def test_callers_are_found_past_the_functions_that_look_for_them():
    def asks_for_optimizer():
        return call_stack.applying_optimizer()

    def _distributed_tf_update_step(self):
        return asks_for_optimizer()

    optimizer = object()
    assert _distributed_tf_update_step(optimizer) is optimizer and asks_for_optimizer() is None
    assert not (lambda: call_stack.called_from_keras_step())()


def test_a_callback_that_remembers_nothing_has_known_attributes():
    class Own(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self._supports_tf_logs = True

    assert not vars(Own()).keys() - keras_internals.STATELESS_ATTRIBUTES, "state: attributes of callbacks have moved"
