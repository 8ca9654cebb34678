"""What Keras' callbacks remember beyond their public interfaces.

A release may move these names: tests/architecture/test_keras_internals.py says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras

# Attributes in which a callback keeps what it has seen of a training.
CALLBACK_STATE: Mapping[type, Sequence[str]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations"),
    keras.callbacks.History: ("epoch", "history"),
}
# The hooks that Keras calls where it takes StopIteration for the end of the data.
BATCH_HOOKS = (
    *(f"on_{loop}_batch_{when}" for loop in ("train", "test", "predict") for when in ("begin", "end")),
    *("on_batch_begin", "on_batch_end"),
)
# Attributes of a callback that remembers nothing.
STATELESS_ATTRIBUTES = vars(keras.callbacks.Callback()).keys() | {"_supports_tf_logs", *BATCH_HOOKS}
