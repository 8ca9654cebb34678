"""`python -m tfdist.cluster` is `tfdist cluster`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("tfdist.commands.cluster", run_name="__main__", alter_sys=True)
