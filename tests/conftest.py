"""One thread for each worker: several of them share the cores, and small models gain nothing from more."""

import os

# Read when torch is imported, here and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
