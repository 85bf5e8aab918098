"""The same model in plain tensor algebra on whole logical weights: slow, and easy to check.

Tests compare the built model, in every layout, with this one in float64.
"""

import torch
from torch.nn.functional import cross_entropy, silu

from megatron_ext.model.config import ModelConfig

Weights = dict[str, torch.Tensor]


def token_losses(
    weights: Weights,
    model: ModelConfig,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    document: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy of each label: [batch, sequence] in the weights' precision.

    weights: logical name -> whole matrix (see logical.logical_shapes). tokens, labels: [batch,
    sequence]. document: [batch, sequence], a number for each document; attention stays inside
    equal numbers.
    """
    return _losses(weights, model, tokens, labels, document)[0]


def objective(
    weights: Weights,
    model: ModelConfig,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    document: torch.Tensor | None = None,
) -> torch.Tensor:
    """What training minimises: the mean of `token_losses`, and the imbalance of the experts."""
    losses, imbalance = _losses(weights, model, tokens, labels, document)
    return losses.mean() + model.router_balance * imbalance


def _losses(
    weights: Weights,
    model: ModelConfig,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    document: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of each label, and the imbalance of all layers together."""
    mask = _mask(tokens, document)
    x = weights["embedding"][tokens]
    imbalance = torch.zeros((), dtype=x.dtype)
    for index in range(model.layers):
        prefix = f"layers.{index}."
        layer = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
        attended = _attention(_norm(x, layer["attention_norm"], model), layer, model, mask)
        x = x + _post_norm(attended, layer, "attention_post_norm", model)
        normed = _norm(x, layer["mlp_norm"], model)
        if model.experts:
            fed_forward, of_layer = _experts(normed, layer, model)
            imbalance = imbalance + of_layer
        else:
            fed_forward = _feed_forward(normed, layer, "mlp")
        x = x + _post_norm(fed_forward, layer, "mlp_post_norm", model)
    head = weights["embedding" if model.tie_head else "head"]
    logits = _norm(x, weights["final_norm"], model) @ head.T
    return cross_entropy(logits.transpose(1, 2), labels, reduction="none"), imbalance


def _mask(tokens: torch.Tensor, document: torch.Tensor | None) -> torch.Tensor:
    """[batch, 1, query, key]: what a query may see."""
    sequence = tokens.shape[1]
    causal = torch.ones(sequence, sequence, dtype=torch.bool).tril()[None, None]
    if document is None:
        return causal
    return causal & (document[:, None, :, None] == document[:, None, None, :])


def _norm(x: torch.Tensor, weight: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + model.norm_epsilon).sqrt() * weight


def _post_norm(x: torch.Tensor, layer: Weights, name: str, model: ModelConfig) -> torch.Tensor:
    return _norm(x, layer[name], model) if model.sandwich_norm else x


def _attention(
    x: torch.Tensor, layer: Weights, model: ModelConfig, mask: torch.Tensor
) -> torch.Tensor:
    def heads(name: str) -> torch.Tensor:  # [batch, heads, sequence, head_dim]
        projected = x @ layer[f"attention.{name}"].T
        return projected.unflatten(-1, (-1, model.head_dim)).transpose(1, 2)

    query = _rotate(_norm(heads("q"), layer["attention.q_norm"], model), model.rope_base)
    key = _rotate(_norm(heads("k"), layer["attention.k_norm"], model), model.rope_base)
    group = model.heads // model.kv_heads
    key, value = (kv.repeat_interleave(group, dim=1) for kv in (key, heads("v")))
    scores = query @ key.transpose(-1, -2) / model.head_dim**0.5
    probabilities = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    context = (probabilities @ value).transpose(1, 2).flatten(2)
    if model.attention_gate:
        context = context * (x @ layer["attention.gate"].T).sigmoid()
    return context @ layer["attention.o"].T


def _rotate(x: torch.Tensor, base: int) -> torch.Tensor:
    """Rotary positions (Su et al., 2021), pairing dimension i with i + head_dim / 2."""
    sequence, width = x.shape[-2:]
    frequencies = base ** -(torch.arange(0, width, 2, dtype=x.dtype) / width)
    angles = torch.arange(sequence, dtype=x.dtype)[:, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _feed_forward(x: torch.Tensor, layer: Weights, name: str) -> torch.Tensor:
    gate, up, down = (layer[f"{name}.{part}"].T for part in ("gate", "up", "down"))
    return (silu(x @ gate) * (x @ up)) @ down


def _experts(
    x: torch.Tensor, layer: Weights, model: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, from every expert on every token, and imbalance (mean over the sequences)."""
    probabilities = (x @ layer["router"].T).softmax(-1)  # [batch, sequence, experts]
    likeliest = probabilities.topk(model.experts_per_token).indices
    chosen = torch.zeros_like(probabilities).scatter(-1, likeliest, 1.0)
    output = sum(
        (probabilities * chosen)[..., index, None] * _feed_forward(x, layer, f"experts.{index}")
        for index in range(model.experts)
    )
    shares = chosen.mean(1) / model.experts_per_token
    return output, model.experts * (shares * probabilities.mean(1)).sum(-1).mean()
