"""A training that is interrupted goes on at the very step."""
