"""How a rank's parameters relate to the whole logical matrices of the model.

Megatron-core fuses and cuts: Q, K and V lie interleaved in one weight, gate and up in another, and
tensor parallelism gives each rank a slice. A *logical* parameter is whole and has a global name
("layers.3.attention.q"). This module is the one place that knows the relation; initialisation, the
optimizer and checkpoints all use it. It is arithmetic on the configuration: it can tell the
segments of any tensor-parallel rank, not just of this one.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from megatron_ext.blocks import Block

if TYPE_CHECKING:
    from megatron_ext.model.config import ModelConfig
    from megatron_ext.replicas import ParallelConfig

Kind = Literal["matrix", "router", "embedding", "head", "norm"]


class UnknownParameterError(ValueError):
    """A model parameter whose relation to logical parameters is not described here."""


@dataclass(frozen=True)
class Segment(Block):
    """A rectangle of this rank's parameter that is also one rectangle of a logical parameter."""

    local: tuple[int, ...]  # where it begins in this rank's parameter

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Index of this segment in the rank's parameter."""
        return tuple(
            slice(begin, begin + length)
            for begin, length in zip(self.local, self.size, strict=True)
        )


@dataclass(frozen=True)
class Run:
    """Consecutive rows (or columns) of one logical parameter inside a fused one."""

    name: str
    shape: tuple[int, ...]  # of the whole logical parameter
    begin: int  # first row (column) in the logical parameter
    length: int  # rows (columns)


@dataclass(frozen=True)
class LogicalParameter:
    """What one torch parameter holds of which logical parameters.

    Put the slices of all tensor-parallel ranks one after another along `axis`: the result is
    `runs`, in order. Each rank holds an equal slice of it. `axis` is None where every rank holds
    the whole.
    """

    kind: Kind
    axis: int | None
    tp: int
    runs: tuple[Run, ...]
    shared_copy: bool = False  # tied embedding's second copy, on the last pipeline stage

    def __post_init__(self) -> None:
        if self.axis is not None and sum(run.length for run in self.runs) % self.tp:
            raise ValueError(
                f"{', '.join(self.names)}: {sum(run.length for run in self.runs)} rows or columns "
                f"cannot be shared equally by {self.tp} tensor-parallel ranks"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Logical names held, each once, in the order in which they first appear."""
        return tuple(dict.fromkeys(run.name for run in self.runs))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of each logical parameter held."""
        return {run.name: run.shape for run in self.runs}

    @property
    def expert(self) -> int | None:
        """Number of the expert in its layer; None for what is not an expert's."""
        match = re.search(r"\.experts\.(\d+)\.", self.runs[0].name)
        return int(match[1]) if match else None

    @property
    def replicated(self) -> bool:
        """Whether all tensor-parallel ranks hold the same values."""
        return self.axis is None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the torch parameter on each rank."""
        shape = list(self.runs[0].shape)
        if self.axis is not None:
            shape[self.axis] = sum(run.length for run in self.runs) // self.tp
        return tuple(shape)

    def segments_of(self, tp_rank: int) -> list[Segment]:
        """Segments of tensor-parallel rank `tp_rank`, in the order they lie in its parameter."""
        if not 0 <= tp_rank < self.tp:
            raise ValueError(f"{self.names}: tensor-parallel rank {tp_rank} of {self.tp}")
        if self.axis is None:
            (run,) = self.runs
            origin = (0,) * len(run.shape)
            return [Segment(run.name, run.shape, origin, run.shape, origin)]
        part = self.local_shape[self.axis]
        first, last = tp_rank * part, (tp_rank + 1) * part
        segments, position = [], 0
        for run in self.runs:
            begin, end = max(first, position), min(last, position + run.length)
            if begin < end:
                offset = self._along_axis(run.begin + begin - position, 0, run)
                size = self._along_axis(end - begin, None, run)
                local = self._along_axis(begin - first, 0, run)
                segments.append(Segment(run.name, run.shape, offset, size, local))
            position += run.length
        return segments

    def _along_axis(self, value: int, other: int | None, run: Run) -> tuple[int, ...]:
        """`value` at the cut axis; elsewhere `other`, or the whole length if `other` is None."""
        return tuple(
            value if dim == self.axis else (length if other is None else other)
            for dim, length in enumerate(run.shape)
        )


def logical_shapes(config: "ModelConfig") -> dict[str, tuple[int, ...]]:
    """Shape of every logical parameter of the whole model, from the input to the output.

    Matrices are [out, in], the embedding and the head [vocabulary, hidden], norms [width], a router
    [experts, hidden].
    """
    hidden, ffn, head_dim = config.hidden, config.ffn, config.head_dim
    kv_width = config.kv_heads * head_dim
    layer = {
        "attention_norm": (hidden,),
        "attention.q": (hidden, hidden),
        "attention.gate": (hidden, hidden),
        "attention.k": (kv_width, hidden),
        "attention.v": (kv_width, hidden),
        "attention.q_norm": (head_dim,),
        "attention.k_norm": (head_dim,),
        "attention.o": (hidden, hidden),
        "attention_post_norm": (hidden,),
        "mlp_norm": (hidden,),
        "router": (config.experts, hidden),
    }
    for feed_forward in _feed_forwards(config):
        layer |= {
            f"{feed_forward}.gate": (ffn, hidden),
            f"{feed_forward}.up": (ffn, hidden),
            f"{feed_forward}.down": (hidden, ffn),
        }
    layer["mlp_post_norm"] = (hidden,)
    if not config.experts:
        del layer["router"]
    if not config.sandwich_norm:
        del layer["attention_post_norm"], layer["mlp_post_norm"]
    if not config.attention_gate:
        del layer["attention.gate"]
    shapes = {"embedding": (config.vocab_size, hidden)}
    for index in range(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["final_norm"] = (hidden,)
    if not config.tie_head:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


def _feed_forwards(config: "ModelConfig") -> list[str]:
    """What is called gate, up and down in a layer: its one feed-forward layer, or its experts."""
    return [f"experts.{index}" for index in range(config.experts)] or ["mlp"]


def parameter_count(config: "ModelConfig") -> int:
    """Parameters of the whole model, a tied embedding once."""
    return sum(torch.Size(shape).numel() for shape in logical_shapes(config).values())


def kind_of(name: str) -> Kind:
    """Kind of a logical parameter by its global name."""
    if name in ("embedding", "head"):
        return name
    if name.endswith(".router"):
        return "router"
    return "norm" if name.endswith("norm") else "matrix"


def describe(
    model_chunks: Iterable[torch.nn.Module], config: "ModelConfig", parallel: "ParallelConfig"
) -> dict[torch.nn.Parameter, LogicalParameter]:
    """The logical description of every parameter of this rank's model chunks.

    The chunks may be wrapped (DDP). Raises UnknownParameterError for a parameter that is not
    described here or whose shape is not what the description says.
    """
    described = {}
    for chunk in model_chunks:
        model = _unwrap(chunk)
        for name, parameter in model.named_parameters():
            logical = describe_parameter(_with_global_numbers(name, model), config, parallel.tp)
            if logical.local_shape != tuple(parameter.shape):
                raise UnknownParameterError(
                    f"model parameter '{name}' has shape {tuple(parameter.shape)}, but "
                    f"{', '.join(logical.names)} at tp={parallel.tp} would give "
                    f"{logical.local_shape}"
                )
            described[parameter] = logical
    return described


def modules_by_global_name(
    model_chunks: Iterable[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module of this rank's model chunks by its name in the whole model."""
    for chunk in model_chunks:
        model = _unwrap(chunk)
        for name, module in model.named_modules():
            yield _with_global_numbers(name, model), module


def describe_parameter(name: str, config: "ModelConfig", tp: int) -> LogicalParameter:
    """The logical description of one parameter by its name in megatron-core's GPTModel.

    The layer in the name counts from the model's first, whatever the pipeline stage, and the expert
    from the layer's first, whatever rank holds it. Raises UnknownParameterError if the parameter
    is not described here.
    """
    shapes = logical_shapes(config)

    def whole(logical_name: str, axis: int | None, **extra) -> LogicalParameter:
        shape = shapes[logical_name]
        run = Run(logical_name, shape, 0, shape[axis or 0])
        return LogicalParameter(kind_of(logical_name), axis, tp, (run,), **extra)

    if name == "embedding.word_embeddings.weight":
        return whole("embedding", axis=0)
    if name == "output_layer.weight":
        if config.tie_head:
            return whole("embedding", axis=0, shared_copy=True)
        return whole("head", axis=0)
    if name == "decoder.final_layernorm.weight":
        return whole("final_norm", axis=None)

    match = re.fullmatch(r"decoder\.(layers\.\d+)\.(.+)", name)
    layer, rest = (match[1], match[2]) if match else ("", name)
    if rest in _LAYER_NORMS:
        return whole(f"{layer}.{_LAYER_NORMS[rest]}", axis=None)
    if rest == "self_attention.linear_proj.weight":
        return whole(f"{layer}.attention.o", axis=1)
    if rest == "self_attention.linear_qkv.weight":
        return LogicalParameter("matrix", 0, tp, _qkv_runs(layer, config, shapes))
    if rest == "mlp.router.weight":
        return whole(f"{layer}.router", axis=None)
    linear = re.fullmatch(r"mlp\.(experts\.local_experts\.\d+\.)?linear_fc([12])\.weight", rest)
    if linear is not None:
        feed_forward = f"{layer}.{(linear[1] or 'mlp').replace('local_experts.', '').rstrip('.')}"
        if linear[2] == "2":
            return whole(f"{feed_forward}.down", axis=1)
        return LogicalParameter("matrix", 0, tp, _gate_up_runs(feed_forward, tp, shapes))
    raise UnknownParameterError(
        f"model parameter '{name}' has no description in {__name__}: its split into logical "
        "matrices is unknown"
    )


# Parameter names below a layer -> logical name below the layer. Transformer Engine keeps the norms
# before QKV and FC1 inside those linear layers, hence two entries for one logical parameter.
_LAYER_NORMS = {
    "input_layernorm.weight": "attention_norm",
    "self_attention.linear_qkv.layer_norm_weight": "attention_norm",
    "self_attention.q_layernorm.weight": "attention.q_norm",
    "self_attention.k_layernorm.weight": "attention.k_norm",
    "self_attn_bda.norm.weight": "attention_post_norm",
    "pre_mlp_layernorm.weight": "mlp_norm",
    "mlp.linear_fc1.layer_norm_weight": "mlp_norm",
    "mlp_bda.norm.weight": "mlp_post_norm",
}


def _unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _with_global_numbers(name: str, model: torch.nn.Module) -> str:
    """The name with the numbers that layer and expert have in the whole model.

    Core counts the layers of a pipeline chunk, and the experts of an expert-parallel rank.
    """
    match = re.fullmatch(r"(decoder\.layers)\.(\d+)\.(.+)", name)
    if match is None:
        return name
    layer, rest = model.decoder.layers[int(match[2])], match[3]
    expert = re.fullmatch(r"(mlp\.experts\.local_experts)\.(\d+)(.*)", rest)
    if expert is not None:
        rest = f"{expert[1]}.{layer.mlp.local_expert_indices[int(expert[2])]}{expert[3]}"
    return f"{match[1]}.{layer.layer_number - 1}.{rest}"


def _qkv_runs(
    layer: str, config: "ModelConfig", shapes: dict[str, tuple[int, ...]]
) -> tuple[Run, ...]:
    """Megatron-core's order: for each query group its query heads, their gates, its key, its value.

    With more ranks than groups the slice of a rank ends within a group; the runs still hold.
    """
    head_dim = config.head_dim
    groups = config.kv_heads
    of_queries = config.heads // groups * head_dim
    rows = {"q": of_queries, "gate": of_queries, "k": head_dim, "v": head_dim}
    if not config.attention_gate:
        del rows["gate"]
    return tuple(
        Run(name := f"{layer}.attention.{part}", shapes[name], group * length, length)
        for group in range(groups)
        for part, length in rows.items()
    )


def _gate_up_runs(
    feed_forward: str, tp: int, shapes: dict[str, tuple[int, ...]]
) -> tuple[Run, ...]:
    """Each rank holds its part of the gate, then its part of up."""
    rows = shapes[f"{feed_forward}.gate"][0] // tp
    return tuple(
        Run(name := f"{feed_forward}.{part}", shapes[name], rank * rows, rows)
        for rank in range(tp)
        for part in ("gate", "up")
    )
