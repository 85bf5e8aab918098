"""Atomic, self-verifying checkpoints of a whole run."""
