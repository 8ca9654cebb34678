"""Prints the devices that Keras lists before TensorFlow has made its own, and after that."""

import keras
import tensorflow as tf

import tfdist  # noqa: F401 (gives Keras its functions)

distribution = keras.distribution
devices = distribution.list_devices()
distribution.set_distribution(distribution.DataParallel())
cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 3)
listed = distribution.list_devices("cpu"), distribution.list_devices("gpu")
print(devices, *listed, distribution.distribution().auto_shard_dataset)
