"""`Trainer`: fit, evaluate, predict and save under every strategy; callbacks on several ranks."""
