"""The reports of this process: its phase, its progress, its stacks, and its signs of work."""
