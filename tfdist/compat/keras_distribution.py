"""The functions behind `keras.distribution` on the TensorFlow backend.

Keras 3.13 and 3.14 cannot create a `DataParallel` there, as `num_processes` and `process_id` are missing, and in all releases `list_devices`
starts TensorFlow, after which no cluster can be joined.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import distribution_lib

from tfdist.errors import ConfigError

# The functions that `keras.distribution` calls. Keras looks them up in this module at each call.
KERAS_LIST_DEVICES = "list_devices"
KERAS_DEVICE_COUNT = "get_device_count"
KERAS_NUM_PROCESSES = "num_processes"
KERAS_PROCESS_ID = "process_id"
KERAS_INITIALIZE = "initialize"
KERAS_DISTRIBUTE_TENSOR = "distribute_tensor"


def install() -> None:
    """Replaces `list_devices`, and adds the functions that Keras' TensorFlow backend lacks. Further calls do nothing."""
    setattr(distribution_lib, KERAS_LIST_DEVICES, list_devices)
    for name, function in {
        KERAS_DEVICE_COUNT: lambda device_type=None: len(list_devices(device_type)),
        # One process as far as Keras knows: the strategy shards data among workers, so Keras must not do it, too.
        KERAS_NUM_PROCESSES: lambda: 1,
        KERAS_PROCESS_ID: lambda: 0,
        KERAS_INITIALIZE: _initialize,
        # Layouts of outputs: each worker computes with whole values.
        KERAS_DISTRIBUTE_TENSOR: lambda tensor, layout: tensor,
    }.items():
        if not hasattr(distribution_lib, name):
            setattr(distribution_lib, name, function)


def list_devices(device_type: str | None = None) -> list[str]:
    """Returns this process's devices of a type, such as `["gpu:0", "gpu:1"]`; without a type, its GPUs or TPUs, or else its CPUs.

    Does not start TensorFlow. Keras' own function does.
    """
    kinds: dict[str, list[str]] = {}
    for name in present_devices():
        kinds.setdefault(name.partition(":")[0].lower(), []).append(name.lower())
    if device_type is not None:
        return kinds.get(device_type.lower(), [])
    return kinds.get("gpu") or kinds.get("tpu") or kinds.get("cpu", [])


def present_devices() -> list[str]:
    """Returns the names of all devices of this process, such as `["CPU:0", "GPU:0"]`. Does not start TensorFlow."""
    present = []
    for kind in dict.fromkeys(device.device_type for device in tf.config.list_physical_devices()):
        devices = tf.config.list_physical_devices(kind)
        count = sum(len(tf.config.get_logical_device_configuration(device) or "1") for device in devices)
        present += [f"{kind}:{number}" for number in range(count)]
    return present


def layout_map(distribution: Any) -> Any:
    """Returns the layout map of a `ModelParallel`."""
    return distribution._layout_map


def _initialize(*_: Any) -> None:
    raise ConfigError(
        "keras.distribution.initialize does not connect processes on TensorFlow, because tfdist.Trainer connects them. Remove the call, and "
        "start the script with `tfdist launch`, or set TF_CONFIG."
    )
