"""A task, a compressor and a resolver that tfdist finds by their entry points."""
