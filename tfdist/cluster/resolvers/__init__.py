"""Resolvers, one file per scheduler: they read the cluster and this process's task from the environment. No TensorFlow here."""
