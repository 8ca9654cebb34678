"""Asynchronous training: variables on servers, steps on workers, Keras' loops on the chief."""
