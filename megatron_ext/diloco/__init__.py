"""The outer loop between replicas."""
