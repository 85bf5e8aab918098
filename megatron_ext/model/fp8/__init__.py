"""FP8 arithmetic in the layers: Transformer Engine's, or emulated where there is no such GPU."""
