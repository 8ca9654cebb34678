"""From a replica's gradients to the update of the variables."""
