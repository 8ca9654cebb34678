"""The cases, by what they are about. Those that say nothing else come from public bug reports."""
