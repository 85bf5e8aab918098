"""Outer learning rate and momentum by method and number of replicas, where none are given.

Published for MuLoCo and DiLoCo (arXiv 2505.23725): K = 1 on the project page and, as DiLoCo's
learning rate, in the code of the single-replica variant; K = 8 (416M) and K = 16 (3.1B) in the
authors' configurations and launchers.
"""

import math

# Replicas: (learning rate, momentum).
_PUBLISHED = {
    "muon": {1: (0.7, 0.6), 8: (0.9, 0.8), 16: (1.0, 0.9)},
    "adamw": {1: (0.7, 0.8), 8: (0.9, 0.9), 16: (1.0, 0.9)},
}
_METHODS = {"muon": "MuLoCo", "adamw": "DiLoCo"}


def outer_defaults(inner: str, replicas: int) -> tuple[float, float, str]:
    """(outer learning rate, outer momentum, where they come from).

    Between published numbers of replicas both are interpolated in log K; above the largest they
    stay.
    """
    table = _PUBLISHED[inner]
    method = _METHODS[inner]
    known = min(replicas, max(table))
    if known in table:
        source = f"{method} at K={known}, arXiv 2505.23725"
        if known != replicas:
            source += f"; nothing is published for K={replicas}"
        return *table[known], source
    below = max(k for k in table if k < known)
    above = min(k for k in table if k > known)
    share = math.log(known / below) / math.log(above / below)
    lr, momentum = (
        round(low + share * (high - low), 3)
        for low, high in zip(table[below], table[above], strict=True)
    )
    source = f"between {method}'s at K={below} and K={above}, arXiv 2505.23725; none for K={known}"
    return lr, momentum, source
