"""Options of a strategy that exists: programs that compare options keep one cluster."""

from __future__ import annotations

import contextlib
import dataclasses


def set_options(strategy, **options):
    strategy.configure(dataclasses.replace(strategy.config, **options))


@contextlib.contextmanager
def options_set(strategy, **options):
    before = strategy.config
    set_options(strategy, **options)
    try:
        yield
    finally:
        strategy.configure(before)
