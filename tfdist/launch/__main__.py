"""`python -m tfdist.launch` is `tfdist launch`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("tfdist.commands.launch", run_name="__main__", alter_sys=True)
