"""The folder of the warm spare's program, which is first on its path. `launch/warm.py` starts it."""
