"""The tasks that come with tfdist."""
