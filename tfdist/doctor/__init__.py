"""Checks of this machine: functions of the environment that yield findings. No TensorFlow in this process."""
