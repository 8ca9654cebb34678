"""A training as a job of a scheduler: a file for each. No TensorFlow here."""
