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
        zeros = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.first = {name: zero.clone() for name, zero in zeros.items()}
        self.second = {name: zero.clone() for name, zero in zeros.items()}

    def step(self, gradients: dict[str, torch.Tensor], lr: float) -> float:
        """One step from whole gradients; returns their global norm before clipping."""
        gradients = {name: gradient.double() for name, gradient in gradients.items()}
        norm = sum(gradient.square().sum() for gradient in gradients.values()).sqrt().item()
        if 0 < self.config.clip < norm:
            gradients = {n: g * (self.config.clip / norm) for n, g in gradients.items()}
        self.steps += 1
        for name, gradient in gradients.items():
            route, weight = self.routes[name], self.weights[name]
            weight.mul_(1 - lr * route.weight_decay)
            update = self._muon if route.optimizer == "muon" else self._adamw
            weight.sub_(lr * route.scale * update(name, gradient))
        return norm

    def _muon(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        momentum, mu = self.first[name], self.config.momentum
        momentum.mul_(mu).add_(gradient)
        direction = gradient + mu * momentum if self.config.nesterov else momentum
        config = self.config
        return orthogonalize(direction, config.newton_schulz_steps, config.coefficients)

    def _adamw(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        beta1, beta2 = self.config.adam_beta1, self.config.adam_beta2
        first, second = self.first[name], self.second[name]
        first.mul_(beta1).add_((1 - beta1) * gradient)
        second.mul_(beta2).add_((1 - beta2) * gradient.square())
        mean = first / (1 - beta1**self.steps)
        variance = second / (1 - beta2**self.steps)
        return mean / (variance.sqrt() + self.config.adam_epsilon)
