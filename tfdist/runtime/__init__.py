"""The process of one task: its memory, signals and exit code, and its progress for the supervisor. No TensorFlow here."""
