"""What a run reports: speed, bytes, TensorBoard."""
