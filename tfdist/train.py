"""`python -m tfdist.train` is `tfdist train`."""

import runpy

from tfdist.runtime.end import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()
    runpy.run_module("tfdist.commands.train", run_name="__main__", alter_sys=True)
