"""The tasks that come with tfdist, and the interface of your own."""
