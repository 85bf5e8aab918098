"""The inner optimizer in float64 on whole matrices in one process: slow, plain and right."""

import torch

from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.muon.newton_schulz import coefficients_of
from megatron_ext.muon.routing import Route


def orthogonalize(matrix: torch.Tensor, steps: int, coefficients: str) -> torch.Tensor:
    """Newton–Schulz of [rows, cols] in float64, without transposing the larger side away."""
    x = matrix.double()
    largest = x.abs().max()
    if largest == 0:
        return x
    x = x / largest
    x = x / x.square().sum().sqrt()
    for a, b, c in coefficients_of(coefficients, steps):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


class Reference:
    """State and step of the inner optimizer for a whole model, by logical name."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        routes: dict[str, Route],
        config: OptimizerConfig,
    ):
        self.weights = {name: weight.double().clone() for name, weight in weights.items()}
        self.routes = routes
        self.config = config
        self.steps = 0
        self.updates: dict[str, torch.Tensor] = {}  # of the last step, before lr and scale
        zeros = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.first = {name: zero.clone() for name, zero in zeros.items()}
        self.second = {name: zero.clone() for name, zero in zeros.items()}

    def step(
        self, gradients: dict[str, torch.Tensor], lr: float, norm: float | None = None
    ) -> float:
        """One step from whole gradients; returns their global norm before clipping.

        `norm`: the global norm, where the gradients are not all that there are.
        """
        gradients = {name: gradient.double() for name, gradient in gradients.items()}
        if norm is None:
            norm = sum(gradient.square().sum() for gradient in gradients.values()).sqrt().item()
        if 0 < self.config.clip < norm:
            gradients = {n: g * (self.config.clip / norm) for n, g in gradients.items()}
        self.steps += 1
        for name, gradient in gradients.items():
            route, weight = self.routes[name], self.weights[name]
            compute = self._muon if route.optimizer == "muon" else self._adamw
            update = self.updates[name] = compute(name, gradient)
            kept = torch.ones_like(weight)
            decays = update * weight >= 0 if self.config.cautious_decay else kept.bool()
            kept[decays] -= lr * route.lr_factor * route.weight_decay
            weight.mul_(kept).sub_(lr * route.lr_factor * route.scale * update)
        return norm

    def _muon(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        momentum, mu = self.first[name], self.config.momentum
        momentum.mul_(mu).add_(gradient)
        direction = gradient + mu * momentum if self.config.nesterov else momentum
        parts = direction.chunk(self.routes[name].heads)
        steps, coefficients = self.config.newton_schulz_steps, self.config.coefficients
        updates = [orthogonalize(part, steps, coefficients) for part in parts]
        if self.config.normuon:
            moments = self.second[name].chunk(len(parts))
            updates = [self._even_rows(*pair) for pair in zip(updates, moments, strict=True)]
        return torch.cat(updates)

    def _even_rows(self, update: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
        """NorMuon; the moment of a row stands in each of its elements."""
        beta = self.config.normuon_beta2
        moment.mul_(beta).add_((1 - beta) * update.square().mean(1, keepdim=True))
        evened = update / moment.clamp_min(1e-8).sqrt()
        return evened * update.norm() / evened.norm().clamp_min(1e-8)

    def _adamw(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        beta1, beta2 = self.config.adam_beta1, self.config.adam_beta2
        first, second = self.first[name], self.second[name]
        first.mul_(beta1).add_((1 - beta1) * gradient)
        second.mul_(beta2).add_((1 - beta2) * gradient.square())
        mean = first / (1 - beta1**self.steps)
        variance = second / (1 - beta2**self.steps)
        return mean / (variance.sqrt() + self.config.adam_epsilon)
