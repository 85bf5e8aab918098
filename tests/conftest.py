"""Settings that must stand before torch is imported anywhere."""

import os

from hypothesis import settings

# Ranks are forked from this process, so it must not have threads of its own.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# Machines are noisy: no test asserts a time.
settings.register_profile("any-speed", deadline=None)
settings.load_profile("any-speed")
