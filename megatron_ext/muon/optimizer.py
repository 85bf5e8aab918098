"""The inner optimizer: Muon on whole matrices at their homes, AdamW on the rest in place.

It stands over megatron-core's DDP, whose reduce-scatter leaves complete gradients on one
data-parallel rank. An all-to-all over the tensor-parallel ranks takes the pieces of matrices to
their homes, one takes the new weights back, and DDP's all-gather spreads them. FP32 masters,
momentum and moments live once in a replica; the weights that the model computes with follow.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from megatron_ext.blocks import Block
from megatron_ext.errors import TrainingError
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.muon.elementwise import Elementwise
from megatron_ext.muon.matrices import MatrixBatch, cut_into_batches
from megatron_ext.muon.newton_schulz import Kernel, refuse_syrk
from megatron_ext.muon.part import Part
from megatron_ext.muon.plan import whole_block
from megatron_ext.muon.stage import Stage
from megatron_ext.muon.views import total_numel, views

# While one batch of a part's matrices is orthogonalised, another travels.
BATCHES = 4


class InnerOptimizer:
    """Distributed Muon with its AdamW half, or AdamW alone, as one rank sees it.

    Attributes:
        blocks: what this rank owns: whole matrices, then the rest.
        masters: FP32, all blocks one after another in one flat tensor.
        average: GPA's x, flat like the masters, which are its z; None without averaging.
        steps: steps taken, for AdamW's bias correction.
    """

    def __init__(
        self, stage: Stage, config: OptimizerConfig, initial: Callable[[Block], torch.Tensor]
    ):
        """Start from the masters that `initial` gives for each block, and set the weights."""
        if config.syrk:
            refuse_syrk(stage.device)
        self.stage = stage
        self.config = config
        self.steps = 0
        self._batches = [batch for part in stage.parts for batch in _batches_of(part)]
        self._rests = [Elementwise(part) for part in stage.parts]
        self._whole = [whole_block(unit) for batch in self._batches for unit in batch.owned]
        self.blocks = self._whole + [block for rest in self._rests for block in rest.blocks]
        masters = [initial(block).flatten() for block in self.blocks]
        self.masters = torch.cat(masters or [torch.empty(0)]).to(stage.device)
        self.average = self.masters.clone() if config.averaging.decay else None
        matrices_numel = total_numel([block.size for block in self._whole])
        self.momentum = torch.zeros_like(self.masters[:matrices_numel])
        self._moment_blocks = [_rows(block) for block in self._whole] if config.normuon else []
        rows = total_numel([block.size for block in self._moment_blocks])
        self._moment = torch.zeros(rows, device=stage.device)
        self._bind()
        self.write_weights()

    def _bind(self) -> None:
        """Give each batch, and each rest, its stretches of the flat tensors."""
        shapes = [[unit.shape for unit in batch.owned] for batch in self._batches]
        sizes = [total_numel(of_batch) for of_batch in shapes]
        momenta = self.momentum.split(sizes)
        moments = [None] * len(sizes)
        if self.config.normuon:
            moments = self._moment.split([sum(s[0] for s in of_batch) for of_batch in shapes])
        sizes += [total_numel([block.size for block in rest.blocks]) for rest in self._rests]
        masters = self.masters.split(sizes)
        count = len(self._batches)
        for batch, *state in zip(self._batches, masters[:count], momenta, moments, strict=True):
            batch.bind(*state)
        for rest, of_rest in zip(self._rests, masters[count:], strict=True):
            rest.bind(of_rest)
        stretches = [slice(*pair) for pair in pairwise(accumulate(sizes, initial=0))]
        # Where the blocks of each lie in the masters.
        self._of_batches, self._of_rests = stretches[:count], stretches[count:]

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Take one step from the gradients that DDP has reduced; returns their global norm.

        The norm is of the whole replica, before clipping. Raises TrainingError, and takes no step,
        when it is not finite.
        """
        norm = self._clip()
        self.steps += 1
        # While one batch is updated, the next one's gradients and the last one's weights travel;
        # more at once would only take memory.
        arrivals = (batch.gather_gradients(self.config) for batch in self._batches)
        arrived, delivered = next(arrivals, None), _nothing_travels
        for rest, stretch in zip(self._rests, self._of_rests, strict=True):
            rest.update(lr, self.steps, self.config)
            delivered()
            delivered = rest.scatter(self._follow(stretch))
        for batch, stretch in zip(self._batches, self._of_batches, strict=True):
            arrived()
            arrived = next(arrivals, None)
            batch.update(lr, self.config)
            delivered()
            delivered = batch.scatter(self._follow(stretch))
        delivered()
        self.stage.gather_weights(at_once=False)
        return norm

    def restart(self) -> None:
        """Begin anew from the masters, which were changed before the first step."""
        if self.average is not None:
            self.average.copy_(self.masters)
        self.write_weights()

    def write_weights(self) -> None:
        """Make the model's weights follow from the masters, after these were changed."""
        self._write(self._trained)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Let the model compute inside the block with what it is judged by: GPA's average."""
        if self.average is None:
            yield
            return
        average = self.average
        self._write(lambda stretch: average[stretch])
        try:
            yield
        finally:
            self.write_weights()

    @torch.no_grad()
    def _write(self, values: Callable[[slice], torch.Tensor]) -> None:
        delivered = _nothing_travels
        everything = [*self._rests, *self._batches]
        for some, stretch in zip(everything, self._of_rests + self._of_batches, strict=True):
            departed = some.scatter(values(stretch))
            delivered()
            delivered = departed
        delivered()
        self.stage.gather_weights(at_once=True)

    def _follow(self, stretch: slice) -> torch.Tensor:
        """After the masters' step: let the average follow; returns what is trained next."""
        if self.average is not None:
            self.average[stretch].lerp_(self.masters[stretch], 1 - self.config.averaging.decay)
        return self._trained(stretch)

    def _trained(self, stretch: slice) -> torch.Tensor:
        """What the model is trained at: the masters, or a point between them and the average."""
        if self.average is None:
            return self.masters[stretch]
        return self.masters[stretch].lerp(self.average[stretch], self.config.averaging.mix)

    def tensors(self) -> Iterator[tuple[str, Block, torch.Tensor]]:
        """Everything that a checkpoint holds of it: kind, block, and a view of the block's size."""
        kinds = [
            ("master", self.masters, self.blocks),
            ("momentum", self.momentum, self._whole),
            ("normuon_moment", self._moment, self._moment_blocks),
        ]
        for rest in self._rests:
            kinds.append(("exp_avg", rest.exp_avg, rest.blocks))
            kinds.append(("exp_avg_sq", rest.exp_avg_sq, rest.blocks))
        if self.average is not None:
            kinds.append(("average", self.average, self.blocks))
        for kind, flat, blocks in kinds:
            for block, view in zip(blocks, views(flat, [b.size for b in blocks]), strict=True):
                yield kind, block, view

    def kernels(self) -> dict[str, Kernel]:
        """What computes the Newton–Schulz products of each matrix whose home this rank is."""
        return {
            name: kernel
            for batch in self._batches
            for name, kernel in batch.kernels(self.config).items()
        }

    def _clip(self) -> float:
        """Scale the owned gradients to a norm of at most `clip`; returns the norm before."""
        gradients = [gradient for _, gradient in self._gradients()]
        norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(1)
        square = norms.to(self.stage.device, torch.float64).square().sum()
        dist.all_reduce(square)  # the default group is the replica
        norm = square.sqrt().item()
        if not norm < float("inf"):
            raise TrainingError(self._name_the_not_finite())
        if 0 < self.config.clip < norm and gradients:
            torch._foreach_mul_(gradients, self.config.clip / norm)
        return norm

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Gradients on this rank; each element of the replica's is on exactly one rank."""
        return [found for some in (*self._batches, *self._rests) for found in some.gradients()]

    def _name_the_not_finite(self) -> str:
        bad = {name for name, gradient in self._gradients() if not gradient.isfinite().all()}
        everywhere: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(everywhere, bad)
        names = sorted(set().union(*everywhere))
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return (
            f"step {self.steps + 1}: the gradient of {', '.join(names[:5])}{more} is not finite; "
            "the step was not taken. Resume from the last checkpoint, with a lower optimizer.lr "
            "if it happens again"
        )


def _batches_of(part: Part) -> list[MatrixBatch]:
    """The matrices of the data-parallel shard that this rank shares with its tensor ranks."""
    units = [unit for unit in part.plan.matrices if unit.shard == part.dp_group.rank()]
    batches = cut_into_batches(units, BATCHES if part.plan.tp > 1 else 1)
    return [MatrixBatch(batch, part) for batch in batches]


def _nothing_travels() -> None:
    pass


def _rows(block: Block) -> Block:
    """Where the value for each row of a whole matrix lies: a column."""
    column = (block.shape[0], 1)
    return Block(block.name, column, (0, 0), column)
