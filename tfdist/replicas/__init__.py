"""What each replica has of its own: its part of a batch, its statistics, random numbers and counts."""
