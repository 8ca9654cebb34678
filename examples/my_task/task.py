"""The task `my_task`: a model, its arguments of `compile`, and its data.

TensorFlow and Keras are imported inside the methods, because the task is imported before TensorFlow is loaded.
"""

import dataclasses

import tfdist


class MyTask(tfdist.Task):
    """Classification of points by whether they lie in a circle. Replace the model and the data by your own."""

    @dataclasses.dataclass
    class Options:
        """Options of the task, set by flags such as `--config.task_options.units=64`.

        Attributes:
            units: Size of the hidden layer.
        """

        units: int = 32

        def faults(self):
            """Yields a message for each invalid value; they are reported before the training starts."""
            if self.units < 1:
                yield f"task_options.units must be 1 or more. Received: {self.units}."

    def build_model(self):
        import keras

        hidden = keras.layers.Dense(self.options.units, "relu")
        return keras.Sequential([keras.Input((2,)), hidden, keras.layers.Dense(1, "sigmoid")])

    def compile_arguments(self):
        return {"loss": "binary_crossentropy", "metrics": ["accuracy"]}

    def steps_per_epoch(self, global_batch_size):
        return 2048 // global_batch_size

    def train_data(self, context, global_batch_size, seed):
        from tfdist import data

        return data.epochs(points(2048, seed=1), context, global_batch_size, seed)

    def eval_data(self, global_batch_size):
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(points(512, seed=2)).batch(global_batch_size)


def points(number, seed):
    """Returns points, `[number, 2]` float32, and whether each is in the circle, `[number, 1]` float32."""
    import numpy as np

    x = np.random.default_rng(seed).uniform(-1, 1, (number, 2)).astype(np.float32)
    return x, (np.square(x).sum(axis=1, keepdims=True) < 0.64).astype(np.float32)
