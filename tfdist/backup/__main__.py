"""`python -m tfdist.backup` is `tfdist backup`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("tfdist.commands.backup", run_name="__main__", alter_sys=True)
