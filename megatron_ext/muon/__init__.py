"""Muon with each matrix orthogonalised whole, once, on any layout."""
