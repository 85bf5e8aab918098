"""`python -m pretrain verify-optimizer`: the optimizer's step on a layout, against float64."""

from megatron_ext import host
from megatron_ext.muon.routing import route_all
from megatron_ext.muon.verify import as_text, judge, verify
from megatron_ext.replicas import initialize_megatron, join
from pretrain.config import Resolved
from pretrain.session import build_inner


def verify_optimizer(resolved: Resolved) -> None:
    """Verify as one process of the run's layout; the first process prints the table.

    Raises VerificationError for an update that is not the reference's.
    """
    config = resolved.config
    host.prepare()
    with join(config.parallel, config.run.timeout_seconds) as replicas:
        with replicas.guard("verification of the optimizer"):
            initialize_megatron(config.parallel, config.train.seed, config.run.timeout_seconds)
            inner = build_inner(config, route_all(config.model, config.optimizer))
            checks = verify(inner)
        if replicas.launcher_rank == 0:
            print(as_text(checks))
        verdict = judge(checks, config.optimizer)
        if replicas.launcher_rank == 0:
            print(verdict)
