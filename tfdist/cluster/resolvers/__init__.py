"""The environment to a cluster and this process's task: a file for each scheduler. No TensorFlow here."""
