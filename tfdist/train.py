"""`python -m tfdist.train` is `tfdist train`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("tfdist.commands.train", run_name="__main__", alter_sys=True)
