"""What tfdist needs of Keras and TensorFlow beyond their public interfaces, and what they cannot do."""
