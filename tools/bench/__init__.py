"""Benchmarks, one command each: `python -m tools.bench.step`."""
