"""Accessors of private names of Keras and TensorFlow, and errors for cases that they do not support."""
