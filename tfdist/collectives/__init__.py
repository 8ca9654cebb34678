"""Sums and messages among the ranks of a strategy."""
