"""A module that needs what is not installed."""

import tfdist_not_there  # noqa: F401
