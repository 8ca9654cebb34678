"""State of each replica: its part of a batch, its statistics, random numbers and counts."""
