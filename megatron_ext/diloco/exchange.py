"""What becomes of a fragment's pseudogradient in the background: judged, packed, averaged."""

from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from megatron_ext.blocks import Block
from megatron_ext.diloco.collective import Collective, ErrorFeedback
from megatron_ext.diloco.config import OuterConfig
from megatron_ext.diloco.plan import plan_buckets
from megatron_ext.diloco.record import Before, Summary, pack, summarise
from megatron_ext.diloco.wire import Wire
from megatron_ext.errors import TrainingError


class Exchange:
    """The exchanges of one fragment on one rank.

    Attributes:
        errors: what error feedback owes, flat like the fragment, by its name in checkpoints.
    """

    def __init__(
        self,
        config: OuterConfig,
        units: Sequence[Block],
        like: torch.Tensor,
        wire: Wire,
        replica: dist.ProcessGroup,
        shift: int,
    ):
        """`like`: a flat tensor where buffers should be; `shift`: see `plan_buckets`.

        `replica` adds up scalars of the replica's ranks, and carries nothing else: the main thread
        has its own collectives under way.
        """
        self._config = config
        self._wire = wire
        self._replica = replica
        alone = wire.count == 1
        first = config.error_feedback and not alone
        second = config.second_error_feedback and not alone
        self._first_leg = ErrorFeedback(like, config.error_decay) if first else None
        self._second_leg = ErrorFeedback(like, config.error_decay) if second else None
        legs = {"error_feedback": self._first_leg, "second_error": self._second_leg}
        self.errors = {kind: leg.error for kind, leg in legs.items() if leg}
        self._is_open = False  # between packing and knowing that it arrived
        self._collective = Collective(
            wire,
            plan_buckets(units, config.codecs_of(units), wire.count, shift),
            config.exchange == "gather",
            self._first_leg,
            self._second_leg,
        )

    def run(self, delta: torch.Tensor, anchor_norm: float, tokens: float, number: int) -> Summary:
        """Replace this replica's pseudogradient by the mean; `tokens` is its weight.

        Raises TrainingError naming a replica whose pseudogradient cannot be used in outer step
        `number`, on all ranks of all replicas, before anything is sent.
        """
        squares = torch.tensor([delta.norm().item(), anchor_norm], dtype=torch.float64) ** 2
        own = torch.cat([self._add_up(squares), torch.tensor([tokens], dtype=torch.float64)])
        gathered = self._wire.gather(own)
        norms = gathered[:, 0].sqrt().tolist()
        before = Before(norms, own[1].sqrt().item(), gathered[:, 2].tolist())
        left_out = judge(norms, self._config, number)
        if self._wire.index in left_out:
            delta.zero_()  # its weight is 0, and 0 · inf is not
        self._is_open = True
        weights = [0.0 if i in left_out else tokens for i, tokens in enumerate(before.tokens)]
        sums = self._collective.reduce(delta, weights)
        error = self._first_leg.error.norm().item() if self._first_leg else 0.0
        totals = self._wire.gather(self._add_up(pack(sums, error)))
        self._is_open = False
        return summarise(before, left_out, totals, self._wire.index)

    def take_back(self) -> None:
        """After an exchange that failed: what it packed never arrived, so it owes nothing for it.

        What it owed from before is lost with it, once packing had begun.
        """
        if self._is_open:
            for error in self.errors.values():
                error.zero_()

    def rehome(self) -> None:
        """After a resume: what the second leg owes is with the replica that reduces it.

        Another layout may have changed which that is; so all learn the sum. Collective.
        """
        if self._second_leg:
            self._collective.rehome(self._second_leg.error)

    def _add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of the replica, FP64."""
        dist.all_reduce(values, group=self._replica)
        return values


def judge(norms: Sequence[float], config: OuterConfig, number: int) -> list[int]:
    """The replicas to leave out of outer step `number`, by the norms of their pseudogradients.

    Raises TrainingError if there are any and the configuration says stop, or if all are bad.
    """
    finite = [norm for norm in norms if norm < float("inf")]
    most = float("inf")
    if config.outlier_factor and finite:
        most = config.outlier_factor * median(finite)
    bad = [index for index, norm in enumerate(norms) if not norm < float("inf") or norm > most]
    if bad and (config.bad_replica == "stop" or len(bad) == len(norms)):
        norm = norms[bad[0]]
        what = (
            f"has norm {norm:.3g}, more than outer.outlier_factor={config.outlier_factor:g} times "
            f"the median {median(finite):.3g}"
            if norm < float("inf")
            else "is not finite"
        )
        raise TrainingError(
            f"outer step {number}: the pseudogradient of replica {', '.join(map(str, bad))} {what};"
            " the outer step was not taken. Resume from the last checkpoint, or set "
            "outer.bad_replica=leave_out"
        )
    return bad
