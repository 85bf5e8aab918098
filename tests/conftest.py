"""Settings that must stand before torch is imported anywhere."""

import os

# Ranks are forked from this process, so it must not have threads of its own.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
