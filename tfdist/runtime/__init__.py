"""The process of one task: its memory, its signals, its exit code, what it tells its supervisor. No TensorFlow here."""
