"""Distributed Muon: each matrix orthogonalised whole, once, on any layout."""

from megatron_ext.lazy import lazy

__getattr__ = lazy(__name__, {"orthogonalize": "newton_schulz"})
