"""Distributed Muon: each matrix orthogonalised whole, once, on any layout."""

from megatron_ext.muon.newton_schulz import orthogonalize

__all__ = ["orthogonalize"]
