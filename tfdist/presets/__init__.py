"""Configurations that come with the package: `--config=NAME`."""
