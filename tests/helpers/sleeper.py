"""A program that tells its number, and sleeps for long."""

import os
import time

if __name__ == "__main__":
    print(os.getpid(), flush=True)
    time.sleep(600)
