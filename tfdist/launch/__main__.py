"""`python -m tfdist.launch` is `tfdist launch`."""

import runpy

from tfdist.runtime.end import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()
    runpy.run_module("tfdist.commands.launch", run_name="__main__", alter_sys=True)
