"""Settings that must stand before torch is imported anywhere, and what several rooms need."""

import os

import pytest
from hypothesis import settings

# Ranks are forked from this process, so it must not have threads of its own.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# Machines are noisy: no test asserts a time.
settings.register_profile("any-speed", deadline=None)
settings.load_profile("any-speed")


@pytest.fixture
def fast_heartbeat(monkeypatch):
    """Forked ranks inherit it, and need not wait so long to tell the silent from the busy."""
    from megatron_ext import presence

    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.5)
