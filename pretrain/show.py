"""The configuration in a terminal: every option, its value and where it came from."""

import textwrap

from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_ext.model.logical import parameter_count
from pretrain.config import (
    Resolved,
    RunConfig,
    allowed,
    fields,
    method_names,
    recipe_names,
    schema_of,
)
from pretrain.yaml_subset import dump

MIN_WIDTH_OF_PURPOSE = 120
_INDENT = {"initial_indent": " " * 6, "subsequent_indent": " " * 6}

USAGE = """
A recipe is the path of a YAML file or a name:
  {recipes}
A method can be laid over it, as in demo+diloco (AdamW's values are those of demo-adamw):
  {methods}
Options are given as section.key=value, for example:

  python -m pretrain demo+streaming-muloco --show
  python -m launch local demo --replicas 2 --tp 2 train.steps=20 run.dir=runs/try

Options:
"""


def print_table(resolved: Resolved) -> None:
    """Print every option, its value, its origin, and what follows from them."""
    # Lists stand in brackets, which are no markup.
    console = Console(markup=False)
    if not console.is_terminal:
        console = Console(markup=False, width=200)
    columns = ["option", "value", "from"] + ["purpose"] * (console.width >= MIN_WIDTH_OF_PURPOSE)
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    declared = fields()
    for key, value, origin in resolved.leaves():
        style = "dim" if origin == "default" else ""
        row = [key, dump(value), origin, Text(_purpose(declared[key]), style="dim")]
        table.add_row(*row[: len(columns)], style=style)
    console.print(table)
    config = resolved.config
    processes = config.parallel.world_size
    total = config.tokens_per_step * config.train.steps
    lines = [
        f"model   {parameter_count(config.model):,} parameters",
        f"layout  {processes} process{'es' * (processes > 1)}, micro-batches of a rank and step: "
        f"{config.micro_batches}",
        f"tokens  {config.tokens_per_step:,} a step, {total:,} in {config.train.steps:,} steps",
    ]
    if config.outer.interval:
        rounds = -(-config.train.steps // config.outer.interval)
        lines.append(f"rounds  {rounds:,} of {config.outer.interval} steps")
    console.print("\n" + "\n".join(lines), highlight=False)


def _usage() -> str:
    return USAGE.format(recipes=" ".join(recipe_names()), methods=" ".join(method_names())).strip()


def help_text() -> str:
    """Every option with what it may be, its default and its purpose."""
    lines = [_usage()]
    section = ""
    for key, field in fields().items():
        if (name := key.split(".")[0]) != section and "." in key:
            section = name
            lines.append(f"\n{section}: {RunConfig.model_fields[section].annotation.__doc__}")
        if derived := (field.json_schema_extra or {}).get("derived"):
            default = f"default {derived}"
        elif field.is_required():
            default = "required"
        else:
            default = f"default {dump(field.default)}"
        lines.append(f"  {key}: {allowed(schema_of(key))} ({default})")
        lines.append(textwrap.fill(_purpose(field), 100, **_INDENT))
    return "\n".join(lines)


def _purpose(field: FieldInfo) -> str:
    """The declaration's own words, without the line ends of the source."""
    return " ".join(field.description.split())
