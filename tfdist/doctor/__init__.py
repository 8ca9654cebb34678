"""What this machine and environment give a training: checks, each with its findings. No TensorFlow in this process."""
