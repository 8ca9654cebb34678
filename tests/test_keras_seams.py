"""The private names of Keras and TensorFlow that tfdist leans on: says which seam a release has moved."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from tensorflow.python.distribute import values
from tensorflow.python.eager import context

import tfdist
from tfdist import cures


@pytest.fixture(scope="module")
def strategy():
    return tfdist.create_strategy("mirrored", devices=2)


def test_keras_learns_shapes_in_the_function_that_reduce_looks_for():
    function = getattr(keras_trainer.TensorFlowTrainer, cures.KERAS_SYMBOLIC_BUILD, None)
    assert function is not None, "seam `reduce`: Keras has renamed its symbolic build"
    assert "distribute_strategy.reduce(" in inspect.getsource(function), "seam `reduce`: no longer called there"


def test_keras_names_a_seed_generators_state_as_expected(strategy):
    with strategy.scope():
        seed = keras.random.SeedGenerator(3).state.value
    first, second = strategy.experimental_local_results(seed)
    assert cures.KERAS_SEED_VARIABLE in seed.name, "seam variable creation: the seed's name has moved"
    assert first.numpy().tolist() == [3, 0]
    assert second.numpy()[0] != 3


def test_statistics_are_told_from_slots_and_metrics(strategy):
    before = len(strategy.statistics.living())
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
        frozen = keras.layers.Dense(2, trainable=False)
        frozen.build((None, 4))
        model.compile("adam", "mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
    assert len(strategy.statistics.living()) - before == 2, "seam variable creation: BatchNorm's two, and nothing else"
    for variable in model.non_trainable_variables:
        assert isinstance(variable.value, values.SyncOnReadVariable)
        assert variable.value.aggregation == tf.VariableAggregation.MEAN
    for variable in (*model.trainable_variables, *model.optimizer.variables, *frozen.variables):
        assert isinstance(variable.value, values.MirroredVariable)


def test_optimizers_reduce_gradients_where_expected():
    source = inspect.getsource(keras.optimizers.Optimizer._backend_update_step)
    assert "_all_reduce_sum_gradients" in source, "seam gradient reduction has moved"


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
    assert isinstance(keras.optimizers.SGD(0.1)._learning_rate, keras.Variable), "lockstep: the learning rate has moved"


def test_tensorflow_tells_whether_a_seed_was_set():
    before = context.global_seed()
    tf.random.set_seed(7)
    assert context.global_seed() == 7
    tf.random.set_seed(before)


def test_a_callback_knows_its_hooks():
    for hook in ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"):
        assert hook in vars(keras.callbacks.Callback)


def test_reduce_sums_structures_and_scalars(strategy):
    ones = strategy.run(lambda: tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32))
    assert strategy.reduce("SUM", ones, axis=0).numpy() == 1
    assert strategy.reduce("MEAN", 1.0, axis=0).numpy() == 1, "a train_step may log a Python number"
    summed = strategy.reduce("SUM", {"a": ones, "b": (ones, ones)}, axis=None)
    assert np.array(tf.nest.flatten(summed)).tolist() == [1, 1, 1]
