"""Asynchronous training: variables on servers, steps on workers, the Trainer's loops on the chief."""
