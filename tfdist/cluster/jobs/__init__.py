"""Job files that run a training under a scheduler: one module per scheduler. No TensorFlow here."""
