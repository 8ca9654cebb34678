"""The commands: a file for each, with `main(argv)`; `tfdist/__main__.py` finds them. No TensorFlow here."""
