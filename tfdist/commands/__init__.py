"""The commands, one file each: `main(argv)` returns the exit code. `tfdist/__main__.py` finds them. No TensorFlow here."""
