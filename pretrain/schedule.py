"""The learning rate of each inner step: a pure function, so there is nothing to save."""

import math

from megatron_ext.muon.config import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of inner step `step` of 1 … `steps`.

    Linear warm-up reaches `lr` at the last warm-up step. After it: cosine to `final_lr_fraction` of
    it at the last step; or wsd, a plateau and then a line down over the last `decay_steps`; or
    constant.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    length = steps - config.warmup_steps
    if config.schedule == "wsd":
        length = config.decay_steps
    done = max(0.0, 1 - (steps - step) / length)
    falling = 1 - done if config.schedule == "wsd" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * falling)
