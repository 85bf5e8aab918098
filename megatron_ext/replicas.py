"""From launcher ranks to replicas, each a world of its own, and the links between them.

The launcher starts K·TP·PP·CP·DP processes. Process p belongs to replica p // inner_world_size and
is rank p % inner_world_size in it. The default process group spans the replica only, so
megatron-core sees a world that is exactly one replica. What crosses replicas is one process group
for each inner rank (`Replicas.link`) and small notes in the rendezvous store.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore

from megatron_ext.errors import ConfigError, PeerError
from megatron_ext.parallel import ParallelConfig
from megatron_ext.presence import Presence


class Replicas:
    """One process's place among all processes of all replicas. Made by `join`."""

    def __init__(
        self,
        parallel: ParallelConfig,
        launcher_rank: int,
        store: Store,
        own_store: Store,
        timeout_seconds: float,
    ):
        self.parallel = parallel
        self.launcher_rank = launcher_rank
        self.store = store
        """Shared by all processes; another thread needs a `store.clone()`."""
        self.own_store = own_store
        """The same of this replica's processes only: it outlives the loss of another replica."""
        self.timeout_seconds = timeout_seconds
        self.link: ProcessGroup | None = None
        """The same rank of all replicas, in their order; None with one replica.

        Call its own methods, as in `link.allreduce([tensor]).wait()`: torch's functions want groups
        of the default group's ranks.
        """
        self._presence = Presence(
            PrefixStore("presence", store), launcher_rank, parallel.world_size
        )
        self._barriers = 0

    @property
    def index(self) -> int:
        """This process's replica, 0 … count - 1."""
        return self.launcher_rank // self.parallel.inner_world_size

    @property
    def count(self) -> int:
        """Number of replicas (K)."""
        return self.parallel.replicas

    @property
    def rank(self) -> int:
        """This process's rank in its replica: its rank in the default process group."""
        return self.launcher_rank % self.parallel.inner_world_size

    @property
    def world_size(self) -> int:
        """Processes of one replica: the size of the default process group."""
        return self.parallel.inner_world_size

    def progress(self, step: int) -> None:
        """Note that inner step `step` begins, so that others can name this process."""
        self._presence.progress(step)

    def barrier(self, what: str) -> None:
        """Wait for all processes of all replicas.

        Raises PeerError naming `what` is waited for and who is missing.
        """
        with self.guard(what):
            missing = self._missing_at_barrier()
            # Those who wait in vain themselves for a silent one are not to blame.
            silent = set(self._presence.silent()) if missing else set()
            missing = [rank for rank in missing if rank in silent] or missing
        if missing:
            raise PeerError(
                f"{what}: no word within {self.timeout_seconds:g} s from {self.names(missing)}"
            )

    def _missing_at_barrier(self) -> list[int]:
        """Wait until all have come or the time is over; returns who has not come."""
        key, previous = f"barrier/{self._barriers}", f"barrier/{self._barriers - 1}"
        self._barriers += 1
        self.store.set(f"{key}/{self.launcher_rank}", "")
        if self.store.add(f"{key}/count", 1) == self.parallel.world_size:
            # Everybody is here, so nobody waits for the barrier before this one any more.
            self.store.delete_key(f"{previous}/count")
            self.store.delete_key(f"{previous}/open")
            self.store.set(f"{key}/open", "")
        self.store.delete_key(f"{previous}/{self.launcher_rank}")
        try:
            self.store.wait([f"{key}/open"], timedelta(seconds=self.timeout_seconds))
        except dist.DistStoreError:
            everybody = range(self.parallel.world_size)
            return [rank for rank in everybody if not self.store.check([f"{key}/{rank}"])]
        return []

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turn a collective's failure inside the block into the PeerError of `blame`."""
        try:
            yield
        except RuntimeError as error:
            if not _is_peer_failure(error):
                raise
            raise self.blame(error, what) from error

    def blame(self, error: BaseException, what: str) -> PeerError:
        """One line that says whose fault the failed collective `what` is.

        In this order: processes that ended with an error, that give no sign of life, that are
        behind. Takes 2.5 s, to tell a silent process from one that is busy.
        """
        try:
            return PeerError(f"{what}: {self._culprits(error)}")
        except RuntimeError:
            return PeerError(
                f"{what}: the rendezvous store no longer answers; "
                "the launcher, or the process that hosts the store, has ended"
            )

    def _culprits(self, error: BaseException) -> str:
        others = [r for r in range(self.parallel.world_size) if r != self.launcher_rank]
        silent = self._presence.silent()
        failures = self._presence.failures()
        if failures:
            rank, reason = next(iter(failures.items()))
            return f"{self.names([rank])} failed: {reason}"
        if silent:
            return f"no sign of life from {self.names(silent)}"
        steps = self._presence.steps(others)
        own = self._presence.steps([self.launcher_rank])[self.launcher_rank]
        behind = [rank for rank in others if steps.get(rank, -1) < own]
        here = [rank for rank in behind if rank // self.world_size == self.index]
        if behind:
            return f"waited in vain for {self.names(here or behind)}"
        return f"a collective failed while every process is alive: {_first_line(error)}"

    def names(self, launcher_ranks: Iterable[int]) -> str:
        """Like "replica 1 rank 0 (last seen at step 97), …", for a message."""
        ranks = list(launcher_ranks)
        steps: dict[int, int] = {}
        with suppress(RuntimeError):  # the store may be what is lost
            steps = self._presence.steps(ranks[:8])
        text = ", ".join(self._name(rank, steps.get(rank)) for rank in ranks[:8])
        return text + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")

    def _name(self, launcher_rank: int, step: int | None) -> str:
        replica, rank = divmod(launcher_rank, self.world_size)
        seen = "never seen" if step is None else f"last seen at step {step}"
        return f"replica {replica} rank {rank} ({'not yet training' if step == -1 else seen})"

    def close(self, error: BaseException | None = None) -> None:
        """Leave the run, because of `error` or in good order."""
        # Who ends because of a peer is not the cause that others should name.
        cause = error is not None and not isinstance(error, PeerError)
        # Without the store nobody is left to be told.
        with suppress(RuntimeError):
            self._presence.leave(_first_line(error) if cause else "")
        self.link = None
        # A group that waits for a lost peer might never shut down; the process ends anyway.
        if error is None and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)


def join(
    parallel: ParallelConfig, timeout_seconds: float = 600, backend: str | None = None
) -> Replicas:
    """Take this process's place in the run, as the launcher's environment says.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun sets them; without
    RANK the process is alone. Afterwards the default process group is this process's replica, RANK
    and WORLD_SIZE are those in the replica, and `Replicas.link` connects the same rank of all
    replicas. Collectives and barriers give up after `timeout_seconds`. `backend` is torch's, by
    default "gloo" without a GPU and "cpu:gloo,cuda:nccl" with one.

    Jobs that were started separately, each with one or more whole replicas, meet where
    REPLICAS_STORE says, as host:port; FIRST_REPLICA is the first replica of this job. The first
    process of replica 0 hosts the store there. What goes on inside a replica stays with its job.

    Raises ConfigError if the number of processes is not the product of the layout's factors, and
    PeerError naming the processes that do not come.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    meeting_point = os.environ.get("REPLICAS_STORE")
    if meeting_point:
        rank += _first_replica(parallel, world_size) * parallel.inner_world_size
    else:
        _check_world_size(parallel, world_size)
    cuda = torch.cuda.is_available()
    backend = backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo")
    # With more, compute may start before the communication that megatron-core overlaps it with.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    timeout = timedelta(seconds=timeout_seconds)
    job_store = _rendezvous(timeout)
    store = _shared_store(meeting_point, rank, timeout) if meeting_point else job_store
    own_store = PrefixStore(f"replica/{rank // parallel.inner_world_size}", job_store)
    replicas = Replicas(parallel, rank, store, own_store, timeout_seconds)
    replicas.barrier("start")

    os.environ["RANK"] = str(replicas.rank)
    os.environ["WORLD_SIZE"] = str(replicas.world_size)
    with replicas.guard("start"):
        dist.init_process_group(
            backend,
            store=PrefixStore("world", own_store),
            rank=replicas.rank,
            world_size=replicas.world_size,
            timeout=timeout,
        )
        if replicas.count > 1:
            store = PrefixStore(f"link/{replicas.rank}", replicas.store)
            replicas.link = _build_group(store, replicas.index, replicas.count, timeout)
    return replicas


def initialize_megatron(parallel: ParallelConfig, seed: int, timeout_seconds: float = 600) -> None:
    """Build megatron-core's groups inside this replica and seed its random states.

    Call after `join`, and without a GPU after `megatron_ext.host.prepare`. Collectives of these
    groups give up after `timeout_seconds`; core's own default is half an hour.
    """
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=(
            parallel.interleave if parallel.interleave > 1 else None
        ),
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_seconds / 60,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _check_world_size(parallel: ParallelConfig, world_size: int) -> None:
    if world_size == parallel.world_size:
        return
    factors = {
        f"parallel.{name}": getattr(parallel, name) for name in ("replicas", "tp", "pp", "cp", "dp")
    }
    product = " × ".join(f"{name}={value}" for name, value in factors.items())
    raise ConfigError(
        f"{world_size} processes were started, but {product} needs {parallel.world_size}; "
        "start that many, or change the factors"
    )


def _first_replica(parallel: ParallelConfig, world_size: int) -> int:
    """The first replica of this job, of which the launcher started `world_size` processes."""
    text = os.environ.get("FIRST_REPLICA", "")
    here, rest = divmod(world_size, parallel.inner_world_size)
    if rest or not here:
        raise ConfigError(
            f"{world_size} processes were started in this job, and a replica of parallel.tp × pp × "
            f"cp × dp has {parallel.inner_world_size}; start whole replicas"
        )
    if not text.isdecimal() or int(text) + here > parallel.replicas:
        raise ConfigError(
            f"FIRST_REPLICA={text} with {here} replicas in this job: must be a number of at most "
            f"{parallel.replicas - here}, because parallel.replicas={parallel.replicas}"
        )
    return int(text)


def _shared_store(address: str, launcher_rank: int, timeout: timedelta) -> Store:
    """The store where jobs that were started separately meet."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"REPLICAS_STORE={address}: must be host:port")
    hosts = launcher_rank == 0
    try:
        store = TCPStore(host, int(port), None, hosts, timeout, wait_for_workers=False)
    except dist.DistError as error:
        if hosts:
            reason = f"replica 0 cannot listen there: {_first_line(error)}"
        else:
            reason = "no answer; is replica 0 running, and is the port reachable?"
        raise PeerError(f"start: REPLICAS_STORE={address}: {reason}") from error
    return PrefixStore("muloco", store)


def _rendezvous(timeout: timedelta) -> Store:
    """The store that all processes of this job share."""
    if "RANK" not in os.environ:
        return TCPStore("127.0.0.1", 0, world_size=1, is_master=True, timeout=timeout)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise PeerError(
            f"start: no rendezvous store at {address} within {timeout.total_seconds():g} s; "
            "is the first process running, and is the port reachable?"
        ) from error
    return PrefixStore("muloco", store)


def _build_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """A process group that the default group knows nothing of; gloo, and NCCL with a GPU.

    torch's `new_group` could not build it: it wants the members to be ranks of the default group.
    """
    kinds = ProcessGroup.BackendType
    group = ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(PrefixStore("cpu", store), rank, size, timeout)
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if torch.cuda.is_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore("cuda", store), rank, size, options)
        group._set_default_backend(kinds.NCCL)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return group


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _is_peer_failure(error: RuntimeError) -> bool:
    """Whether a collective or the store failed; gloo raises plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, dist.DistError) or any(
        sign in text for sign in ("/gloo/", "Connection closed by peer", "Timed out waiting")
    )
