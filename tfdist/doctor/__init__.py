"""Checks of this machine and environment: functions of the environment that yield findings. No TensorFlow in this process."""
