"""One training or test step on all replicas: its share of the batch, its losses, its logs."""
