"""Models and data that Keras 3 and tf_keras build alike, with weights that do not depend on either."""

import numpy as np

EPOCHS = 3
BATCH = 32


def dense(keras):
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(24, activation="tanh"),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(3),
        ]
    )


def gru(keras):
    return keras.Sequential([keras.Input((6, 4)), keras.layers.GRU(8), keras.layers.Dense(3)])


def cnn(keras):
    """Has no bias before BatchNorm: its gradient is rounding noise, which differs between any two programs."""
    # tf_keras' fused kernel counts variance with N/(N-1).
    fused = {"fused": False} if keras.__name__ == "tf_keras" else {}
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.8, **fused),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


CASES = {
    "dense_sgd": (dense, "sgd"),
    "dense_adam": (dense, "adam"),
    "gru_sgd": (gru, "sgd"),
    "gru_adam": (gru, "adam"),
    "cnn_sgd": (cnn, "sgd"),
}
# Each optimizer once. Recurrent models are in test_fit.py, too: "masked_steps".
QUICK_CASES = ("dense_adam", "cnn_sgd")
# Of examples, in batches of 32 on two replicas. The quick ones: a replica without any, a whole batch before that, and a short
# batch of both after several whole ones.
SIZES = (1, 5, 32, 33, 63, 77, "files")
QUICK_SIZES = (1, 33, 77, "files")
# The scenarios of `program` that the first tier asks of a strategy, and the others.
QUICK = {
    "one_device": ("fine_tuning",),
    "multi_worker_mirrored": ("everything", "fine_tuning"),
    "central_storage": (
        *("coverage", "parity", "trainer_fit", "inference", "dropout", "further_parity", "further_inference"),
    ),
}
OF_WORKERS = ("coverage", "parity", "trainer_fit", "inference", "dropout", "noise")
FURTHER = {
    "one_device": ("parity", "inference", "further_parity", "further_inference"),
    "mirrored": (
        *(*OF_WORKERS, "everything", "fine_tuning"),
        *("further_parity", "further_inference", "further_noise"),
    ),
    "multi_worker_mirrored": (*OF_WORKERS, "further_parity", "further_inference", "further_noise"),
    "central_storage": (),
}


def data(model, size=96, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, *model.input_shape[1:]), np.float32)
    return x, rng.integers(0, 3, size).astype(np.int32)


def compiled(keras, build, optimizer):
    """Returns the model with fixed weights."""
    model = build(keras)
    rng = np.random.default_rng(1)
    model.set_weights(
        # A variance must be positive.
        [w if w.min() == 1 else rng.uniform(-0.5, 0.5, w.shape).astype(np.float32) for w in model.get_weights()]
    )
    optimizers = {
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(1e-3),
    }
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers[optimizer](), loss, metrics=["accuracy"])
    return model


def train(model, x, y, fit=None):
    """Trains over full batches in order; returns losses and weights."""
    history = (fit or model.fit)(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
    return {"history": history, "weights": model.get_weights()}


def line(keras):
    """Returns a compiled model of one layer that begins at 0, and its data: examples of 5 batches of 10."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 1.0)), "mse")
    x = np.random.default_rng(0).standard_normal((50, 2), np.float32)
    return model, x, x[:, :1] - 2 * x[:, 1:]


def line_gradient_norms(steps):
    """Returns the norm of the gradient of each step of `line` on its data in order, by plain arithmetic."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 2), np.float32).astype(np.float64)
    inputs, y = np.hstack([x, np.ones((50, 1))]), x[:, 0] - 2 * x[:, 1]
    weights, norms = np.zeros(3), []  # the kernel and the bias
    for number in range(steps):
        batch = slice(number % 5 * 10, number % 5 * 10 + 10)
        gradient = 2 * inputs[batch].T @ (inputs[batch] @ weights - y[batch]) / 10
        weights -= 0.1 / (1 + number) * gradient
        norms.append(np.linalg.norm(gradient))
    return norms
