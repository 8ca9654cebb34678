"""The commands, one file each: `main(argv)` returns the exit code. `tfdist/__main__.py` lists them. No TensorFlow here."""
