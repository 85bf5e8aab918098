"""`python -m pretrain checkpoint …`: look at, check, compare and convert, by one process."""

from pretrain.checkpoint.command import main

__all__ = ["main"]
