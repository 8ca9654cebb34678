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
from keras.src.saving import saving_lib
from keras.src.trainers import compile_utils, data_adapters
from keras.src.trainers import epoch_iterator as keras_epochs
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
from tfdist.compat import (
    call_stack,
    keras_distribution,
    keras_internals,
    keras_loops,
    keras_losses,
    keras_metrics,
    tapes,
    tf_cluster,
    tf_internals,
)
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
    tapes,
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


OPTIMIZER, EXTENDED = keras.optimizers.Optimizer, collective_all_reduce_strategy.CollectiveAllReduceExtended
# Keras 3.16 asks for the parts that are not built by a method of their own.
ASKS_FOR_BUILD = getattr(keras.Model, "_get_unbuilt_components", getattr(keras.Model, keras_loops.KERAS_BUILD_BY_CALL))
BUILD_BY_CALL = getattr(keras.Model, keras_loops.KERAS_BUILD_BY_CALL)
# (seam, class, function or module, texts of its source by which tfdist reads or replaces something there).
SEAMS = [
    (
        "building",
        ASKS_FOR_BUILD,
        f"self.{keras_metrics.KERAS_COMPILED_METRICS}.built",
        f"self.{keras_losses.KERAS_COMPILED_LOSS}.built",
    ),
    ("building", BUILD_BY_CALL, "self.compute_metrics,", f"self.{keras_loops.KERAS_COMPUTE_LOSS},"),
    ("step function", keras.Model.make_train_function, keras_internals.KERAS_MAKE_FUNCTION),
    ("step function", keras.Model.make_test_function, keras_internals.KERAS_MAKE_FUNCTION),
    ("prediction", model_methods.keras_own("make_predict_function"), "self.predict_function is not None and not force"),
    ("prediction", model_methods.keras_own("predict_on_batch"), "self.predict_function([(x,)])"),
    ("loading", model_methods.keras_own("compile_from_config"), "and self.built:", "self.optimizer.build("),
    ("logs of an epoch", model_methods.keras_own("fit"), "self._get_metrics_result_or_logs(logs)"),
    ("logs of an epoch", model_methods.keras_own("evaluate"), "self._get_metrics_result_or_logs(logs)"),
    ("logs of an epoch", keras.Model._get_metrics_result_or_logs, "self.get_metrics_result()"),
    (
        "losses",
        keras.Model.compute_loss,
        f"self.{keras_losses.KERAS_ADDED_LOSS}(loss)",
        f"self.{keras_losses.KERAS_COMPILED_LOSS}(",
    ),
    ("losses", keras.Model.train_step, f"self.{keras_losses.KERAS_LOSS_TRACKER}.update_state("),
    ("losses", keras.Model.test_step, f"self.{keras_losses.KERAS_LOSS_TRACKER}.update_state("),
    ("losses", compile_utils.CompileLoss._build_nested, f"self.{keras_losses.KERAS_LOSSES}.append("),
    ("losses", compile_utils.CompileLoss.call, f"in self.{keras_losses.KERAS_LOSSES}"),
    ("masks", losses.reduce_weighted_values, "apply_mask("),
    ("masks", keras.losses.Loss.__call__, "get_keras_mask(y_pred)"),
    ("metrics", compile_utils.CompileMetrics.update_state, "self.build(y_true, y_pred)"),
    ("moments", keras.layers.BatchNormalization.call, f"self.{keras_internals.KERAS_MOMENTS}(inputs, mask)"),
    (
        "gradient reduction",
        getattr(OPTIMIZER, keras_internals.KERAS_UPDATE_VARIABLES),
        keras_internals.KERAS_REDUCTION,
        call_stack.KERAS_APPLY,
    ),
    (
        "gradient reduction",
        getattr(OPTIMIZER, call_stack.KERAS_APPLY),
        "distribution.extended",
        f"self.{keras_internals.KERAS_UPDATE_STEP}(grad, var, learning_rate)",
    ),
    ("gradient reduction", OPTIMIZER.apply, keras_internals.KERAS_UPDATE),
    ("gradient reduction", OPTIMIZER.apply_gradients, "self.apply("),
    (
        "gradient reduction",
        getattr(OPTIMIZER, keras_internals.KERAS_UPDATE),
        f"self.{keras_internals.KERAS_CLIP}(",
        f"self.{keras_internals.KERAS_WEIGHT_DECAY}(trainable_variables)",
    ),
    (
        "loss scale",
        keras.optimizers.LossScaleOptimizer,
        "self.inner_optimizer.apply(",
        "self.check_finite",
        f"self.{keras_internals.KERAS_UPDATE_SCALED}(",
        f"self.{keras_internals.KERAS_SKIP_SCALED},",
    ),
    (
        "tapes",
        tf.GradientTape,
        f"self.{tapes.TF_RECORDING} = False",
        "def stop_recording(self)",
        "def gradient(self, target, sources,",
        "def jacobian(self, target, sources,",
        "def batch_jacobian(self, target, source,",
    ),
    ("tapes", tf.distribute.ReplicaContext.all_reduce, "def all_reduce(self, reduce_op, value,"),
    ("data adapters", data_adapters, *keras_loops.KERAS_SELF_FEEDING),
    ("passes over the data", keras_epochs.EpochIterator, "iter(self._get_iterator())"),
    ("writers", keras.export.ExportArchive().write_out, "tf.saved_model.save("),
    ("writers", tf.saved_model.save, f"{tf_internals.TF_WRITE_SAVED_MODEL}(obj, export_dir, signatures, options)"),
    ("tables", saving_lib, "if is_memory_sufficient(model)"),
    ("tables", saving_lib.H5IOStore, "def _create_h5_group(self, path", "self._create_h5_group(self._h5_entry_path)"),
    (
        "tables",
        saving_lib.H5IOStore.__setitem__,
        "if not self._h5_entry_initialized",
        "self._h5_entry_group[key] = value",
    ),
    (
        "checkpoints",
        tf.train.Checkpoint,
        "self._saver.save(file_prefix=file_prefix, options=options)",
        "self._saver.restore(save_path=save_path, options=options)",
    ),
    ("checkpoints", tf.train.CheckpointManager.save, "self._checkpoint._write("),
    ("keys of collectives", EXTENDED, f"container_strategy.{tf_internals.TF_COLLECTIVE_KEYS}"),
    ("keys of collectives", mirrored_strategy.MirroredExtended, tf_internals.TF_COLLECTIVE_KEYS),
    (
        "collectives",
        EXTENDED,
        f'getattr(self, "{tf_cluster.TF_SERVES}", False)',
        f"self.{tf_cluster.TF_CROSS_DEVICE_OPS} =",
        f"self.{tf_cluster.TF_HOST_CROSS_DEVICE_OPS} =",
    ),
    ("initial values", EXTENDED._get_variable_creator_initial_value, "collective_ops.broadcast_send("),
    ("collectives", cross_device_ops.CollectiveAllReduce.__init__, f"self.{tf_cluster.TF_LAUNCHERS} = []"),
    (
        "collectives",
        cross_device_utils.CollectiveReplicaLauncher,
        "def _next_instance_key(",
        "def _get_ordering_token(",
        "def all_reduce_indexed_slices(",
        "def can_order_nccl(",
        *(f"self.{name} =" for name in ("_group_key", "_group_size", "_device", "_options")),
    ),
    ("heartbeats", EXTENDED._initialize_multi_worker, "if context.context().coordination_service is None:"),
    ("connecting", context.Context.ensure_initialized, f"pywrap_tfe.{tf_cluster.TF_WAITING[0]}("),
    ("connecting", context.Context.enable_collective_ops, f"pywrap_tfe.{tf_cluster.TF_WAITING[0]}("),
    ("connecting", context.Context.add_c_function, f"pywrap_tfe.{tf_cluster.TF_WAITING[1]}("),
    ("connecting", context.Context.remove_function, f"pywrap_tfe.{tf_cluster.TF_WAITING[2]}("),
    (
        "lost workers",
        context.Context,
        "def abort_collective_ops(",
        "def wait_at_barrier(",
        "def configure_coordination_service(",
        "def get_config_key_value(",
        "def set_config_key_value(",
    ),
    (
        "average loss",
        tf_internals.average_losses.compute_average_loss,
        f"{tf_internals.TF_AVERAGE_ARITHMETIC}.{tf_internals.TF_AVERAGE_DIVISION}(loss, global_batch_size)",
        f"{tf_internals.TF_AVERAGE_COUNTED} = ",
    ),
    (
        "scheduler",
        cluster_coordinator,
        f"self.{tf_cluster.TF_CLUSTER} = Cluster(strategy)",
        "def schedule(self, function, args, kwargs)",
        "with ops.device(worker.device_name)",
    ),
    *(
        ("distribution", inspect.getmodule(keras.distribution.list_devices), f"distribution_lib.{name}(")
        for name in (
            keras_distribution.KERAS_LIST_DEVICES,
            keras_distribution.KERAS_NUM_PROCESSES,
            keras_distribution.KERAS_PROCESS_ID,
            keras_distribution.KERAS_INITIALIZE,
            keras_distribution.KERAS_DISTRIBUTE_TENSOR,
        )
    ),
    *(
        ("writers", inspect.getmodule(function), f"{module.__name__.rpartition('.')[2]}.{name}(")
        for function in (keras.saving.save_model, keras.saving.save_weights)
        for module, name in keras_internals.KERAS_WRITERS
    ),
]


@pytest.mark.parametrize("seam", dict.fromkeys(seam for seam, *_ in SEAMS))
def test_keras_and_tensorflow_do_there_what_tfdist_reads_or_replaces(seam):
    moved = []
    for name, owner, *texts in SEAMS:
        if name == seam:
            source = " ".join(inspect.getsource(inspect.unwrap(owner)).split())
            moved += [f"{owner}: {text}" for text in texts if text not in source]
    assert not moved, "\n".join(moved)


@pytest.fixture(scope="module")
def strategy():
    return tfdist.create_strategy("mirrored", devices=2)


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


def test_iterators_of_several_devices_are_not_autotuned(strategy):
    def tuned(distributed):
        (iterator,) = distributed._iterators
        return [each._dataset.options().autotune.enabled for each in iterator._iterator._device_iterators]

    moved = f"distributed data: {tf_internals.TF_DEVICE_DATASET} has moved"
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))
    assert tuned(iter(data)) == [False, False], moved


def test_a_tape_within_another_one_is_told():
    told = []

    class Hook:
        def asked(self, sources):
            pass

        def returned(self, sources, grads):
            told.append("returned")
            return grads

        def keeps_local(self, sources):
            told.append("local")

    x = tf.Variable(2.0)
    with tapes.hooked(Hook()):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = x**3
            first = inner.gradient(y, x)
        second = outer.gradient(first, x)
        with tf.GradientTape(persistent=True) as alone:
            y = x**2
            alone.gradient(y, x)
            alone.jacobian(tf.stack([y, y]), x)
    assert float(second) == 12
    assert told == ["local", "returned", "returned", "local"], "seam tapes: TensorFlow keeps its tapes elsewhere"


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


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_a_lost_task_is_told_by_the_message_of_its_error(job):
    lost = tf.errors.UnavailableError(
        None, None, f"GRPC error information from remote target /job:{job}/replica:0/task:1"
    )
    assert tf_cluster.is_server_failure(lost) == (job == "ps")
    assert tf_cluster.is_worker_failure(lost) == (job == "worker")


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
    assert not {"__float__", "__int__"} & set(dir(values.MirroredVariable)), "make_readable_as_number can go"
    with pytest.raises(ValueError, match="Invalid reduction dimension"):
        tf.function(lambda: stock.reduce("MEAN", stock.run(lambda: tf.constant(1.0)), axis=0))()


def test_reduce_sums_structures_and_scalars(strategy):
    ones = strategy.run(lambda: tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32))
    assert strategy.reduce("SUM", ones, axis=0).numpy() == 1
    assert strategy.reduce("MEAN", 1.0, axis=0).numpy() == 1, "a train_step may log a Python number"
    summed = strategy.reduce("SUM", {"a": ones, "b": (ones, ones)}, axis=None)
    assert np.array(tf.nest.flatten(summed)).tolist() == [1, 1, 1]


# What they change in hooks, and set anew when a training begins.
NOT_BACKED_UP = {"best_epoch", "monitor_op", "csv_file", "_batch_trace_context", "_should_trace", "_is_tracing"}
NOT_BACKED_UP |= {"_should_write_train_graph", "_train_accumulated_time"}
HOOKS = ("on_train_batch_end", "on_epoch_end", "_save_model", "_should_save_on_batch", "_is_improvement")


@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.EarlyStopping("loss"),
        keras.callbacks.ReduceLROnPlateau("loss"),
        keras.callbacks.ModelCheckpoint("x.keras"),
        keras.callbacks.History(),
        keras.callbacks.TensorBoard("x"),
        keras.callbacks.SwapEMAWeights(),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_the_state_of_keras_callbacks_is_known(callback):
    backed_up = keras_internals.CALLBACK_STATE[type(callback)]
    source = inspect.getsource(type(callback))
    for name in backed_up:
        assert f"self.{name}" in source or hasattr(callback, name), f"{name} has moved"
    hooks = [inspect.getsource(method) for name, method in vars(type(callback)).items() if name in HOOKS]
    changed = set(re.findall(r"self\.(\w+) [+-]?= ", "\n".join(hooks)))
    assert changed <= {*backed_up, *NOT_BACKED_UP}


def test_variables_are_told_by_their_names():
    moved = "parameter_servers, data_state: the names of variables have moved"
    sgd = keras.optimizers.SGD(0.1)
    sgd.build([keras.Variable(1.0)])
    assert {v.name for v in sgd.variables} >= set(keras_internals.OPTIMIZER_SCALARS), moved
    assert keras.random.SeedGenerator(1).state.name.startswith(keras_internals.SEED_STATE), moved
    assert tf.random.Generator.from_seed(1).state.name.startswith(tf_internals.GENERATOR_STATE), moved


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
