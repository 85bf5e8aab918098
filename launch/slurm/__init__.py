"""Batch scripts for Slurm: one job for all replicas, or one for each."""
