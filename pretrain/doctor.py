"""The resume doctor: what differs between a checkpoint and the run that goes on from it.

Each difference is honoured, honoured because it was asked for by name, or refused. Nothing that
differs stays unsaid.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal

from pydantic import Field, model_validator
from rich.console import Console
from rich.table import Table

from megatron_ext.checkpoint.loading import InnerState
from megatron_ext.config import Section
from megatron_ext.errors import ConfigError

Verdict = Literal["honoured", "deliberate", "refused"]


class ResumeConfig(Section):
    """From where a run goes on. `resume=X` is short for `resume.checkpoint=X`."""

    checkpoint: str = "auto"
    """auto (the run's latest checkpoint, if there is one), none, or a checkpoint's path."""
    fallback: bool = False
    """With auto and a damaged newest checkpoint, set it aside and take the one before."""
    allow: tuple[str, ...] = Field((), strict=False)
    """Differences from the checkpoint that are meant, by the names that a refusal gives."""
    inner: InnerState = "clone"
    """Inner optimizer state of a replica that the checkpoint does not hold: clone takes a saved
    replica's (its index modulo their number), mean that of all of them, and zero begins anew."""
    weights: str | None = Field(None, min_length=1)
    """Where a run begins anew, take the global weights of this checkpoint instead of random ones;
    step, optimizer state and data begin at the beginning."""

    @model_validator(mode="after")
    def _check(self) -> "ResumeConfig":
        if self.weights and self.checkpoint not in ("auto", "none"):
            raise ConfigError(
                f"resume.weights={self.weights} with resume.checkpoint={self.checkpoint}: a run "
                "either goes on from a checkpoint or begins anew from weights; give one of them"
            )
        return self


# They say where a run lies, when it is saved and when a session ends, not what is computed.
_IRRELEVANT = (
    "run.",
    "checkpoint.",
    "data.blend",  # the path; what counts is the content, see "data"
    "data.cache",
    "resume.",
    "train.stop_at",
    "train.log_every",
    "train.fused_gradients",
    "validation.",
)

_NEW_ORDER = "another order of samples, from its first one on"
_NOT_SAVED = "the checkpoint holds no state for it; resume.weights starts anew from its weights"

# The first prefix that fits decides.
_RULES: tuple[tuple[str, Verdict, str], ...] = (
    ("model.implementation", "honoured", "computes the same"),
    ("model.norm_epsilon", "deliberate", "the weights were trained with the other value"),
    ("model.rope_base", "deliberate", "the weights were trained with the other value"),
    ("model.document_masking", "deliberate", "the weights were trained with the other value"),
    ("model.experts_per_token", "deliberate", "the weights were trained with the other value"),
    ("model.router_balance", "honoured", "from the next step on"),
    ("model.sequence_length", "deliberate", _NEW_ORDER),
    ("model.", "refused", "the weights in the checkpoint are of the other model"),
    ("fp8.format", "deliberate", "the layers compute in the other precision from here on"),
    ("data.skip", "honoured", "what lies ahead is left out"),
    ("data", "deliberate", _NEW_ORDER),
    ("tokenizer", "deliberate", "the weights know the other tokenizer"),
    ("train.seed", "deliberate", _NEW_ORDER),
    ("train.global_batch", "deliberate", "the order of samples goes on, in other steps"),
    ("train.steps", "honoured", "the order of samples goes on; schedules end at the new last step"),
    ("train.precision", "honoured", "computed from the FP32 masters"),
    ("routing", "deliberate", "the optimizer state was made by the other rule"),
    ("parallel.replicas", "honoured", "all start from the mean of the saved replicas' masters"),
    ("parallel.", "honoured", "the checkpoint holds whole matrices"),
    ("optimizer.name", "refused", _NOT_SAVED),
    ("optimizer of ", "refused", _NOT_SAVED),
    ("outer.optimizer", "refused", _NOT_SAVED),
    ("outer.fragments", "refused", "each fragment is at its own place in the round"),
    ("outer.fragment_order", "refused", "each fragment is at its own place in the round"),
    ("", "honoured", "from the next step on"),
)

_WIDEST = 32  # columns of a value in the table

# State comes with the first value that is not 0, and goes with the last.
_SWITCHES = ("outer.interval", "outer.delay", "optimizer.averaging.decay", "optimizer.normuon")


@dataclass(frozen=True)
class Finding:
    """One thing that differs."""

    name: str
    checkpoint: Any
    requested: Any
    rule: str
    refused: bool = False
    allowance: str | None = None
    """What to name in resume.allow, where that would be honoured."""

    @property
    def effective(self) -> Any:
        """What the run goes on with."""
        return "refused" if self.refused else self.requested


def examine(
    saved: Mapping[str, Any], requested: Mapping[str, Any], allow: Sequence[str]
) -> list[Finding]:
    """Compare two descriptions: values by name, of options and of what counts besides.

    Raises ConfigError for a name in `allow` that no rule leaves to the user.
    """
    allowable = [prefix for prefix, verdict, _ in _RULES if verdict == "deliberate"]
    for name in allow:
        if name not in allowable:
            raise ConfigError(
                f"resume.allow names {name}, which is not a difference that may be allowed; these "
                f"may: {', '.join(allowable)}"
            )
    return [
        _judge(name, saved.get(name), requested.get(name), allow)
        for name in sorted({*saved, *requested})
        if saved.get(name) != requested.get(name) and not name.startswith(_IRRELEVANT)
    ]


def _judge(name: str, before: Any, now: Any, allow: Sequence[str]) -> Finding:
    prefix, verdict, rule = next(each for each in _RULES if name.startswith(each[0]))
    if name in _SWITCHES and bool(before) != bool(now):
        verdict, rule = "refused", _NOT_SAVED
    if verdict != "deliberate":
        return Finding(name, before, now, rule, refused=verdict == "refused")
    allowed = prefix in allow
    why = f"{rule} ({'allowed' if allowed else 'not allowed'} by resume.allow)"
    return Finding(name, before, now, why, refused=not allowed, allowance=prefix)


def refuse(findings: Sequence[Finding], path: str) -> None:
    """Raise ConfigError, naming everything that cannot be honoured, if there is any."""
    refused = [found for found in findings if found.refused]
    if not refused:
        return
    named = "; ".join(
        f"{found.name} is {_text(found.requested)} and was {_text(found.checkpoint)}: {found.rule}"
        for found in refused
    )
    names = sorted({found.allowance or "" for found in refused})
    hint = f"; if that is meant, resume.allow=[{','.join(names)}]" if all(names) else ""
    raise ConfigError(f"{path} cannot go on like this: {named}{hint}")


def table_text(findings: Sequence[Finding]) -> str:
    """The findings as a table of checkpoint, requested and effective."""
    table = Table("", "checkpoint", "requested", "effective", "because", box=None, pad_edge=False)
    for found in findings:
        values = (found.checkpoint, found.requested, found.effective)
        table.add_row(found.name, *map(_text, values), found.rule)
    console = Console(width=200, file=StringIO(), markup=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _text(value: Any) -> str:
    text = "—" if value is None else json.dumps(value, ensure_ascii=False).strip('"')
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
