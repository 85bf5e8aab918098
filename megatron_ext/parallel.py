"""How the processes of a run share the work."""

from pydantic import PositiveInt, model_validator

from megatron_ext.config import Section
from megatron_ext.errors import ConfigError


class ParallelConfig(Section):
    """How many processes, and how they share the work."""

    replicas: PositiveInt = 1
    """Replicas (K), each with weights of its own between outer steps."""
    tp: PositiveInt = 1
    """Tensor parallelism: ranks that share each matrix."""
    pp: PositiveInt = 1
    """Pipeline parallelism: stages of consecutive layers."""
    cp: PositiveInt = 1
    """Context parallelism: ranks that share each sequence."""
    dp: PositiveInt = 1
    """Data parallelism inside a replica: ranks that share each batch."""
    ep: PositiveInt = 1
    """Expert parallelism: data-parallel ranks that share the experts of a layer out."""
    sequence_parallel: bool = False
    """Cut activations between the tensor-parallel layers along the sequence."""
    interleave: PositiveInt = 1
    """Model chunks per pipeline stage; more than 1 is the interleaved schedule."""

    @property
    def inner_world_size(self) -> int:
        """Processes of one replica."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        """Processes of all replicas together."""
        return self.replicas * self.inner_world_size

    @model_validator(mode="after")
    def _check(self) -> "ParallelConfig":
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError(
                "parallel.sequence_parallel=true needs parallel.tp of at least 2; "
                "with parallel.tp=1 there is nothing to cut"
            )
        if self.interleave > 1 and self.pp == 1:
            raise ConfigError(
                f"parallel.interleave={self.interleave} needs parallel.pp of at least 2"
            )
        if self.dp * self.cp % self.ep:
            raise ConfigError(
                f"parallel.ep={self.ep} does not divide parallel.dp × parallel.cp="
                f"{self.dp * self.cp}, the ranks that share the experts of a layer out; use a "
                "divisor, or more data parallelism"
            )
        return self
