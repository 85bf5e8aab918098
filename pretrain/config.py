"""From a recipe and `key=value` overrides to a checked configuration that knows its origins.

A recipe is a YAML file. It may build on another one with `extends: NAME or PATH`. Its sections and
keys are those of `RunConfig`; a key that is not there is refused with the nearest one that is.
`RECIPE+METHOD` lays a method over a recipe: a file in recipes/methods, whose `inner`, if there is
one, says which inner optimizer it is about. AdamW's values for RECIPE are those of the recipe
RECIPE-adamw. Several methods may follow one another, as in 15b+streaming-muloco+fp8.
"""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megatron_ext.config import Section
from megatron_ext.errors import ConfigError
from pretrain import yaml_subset
from pretrain.settings import RunConfig, RunSection, check_machine

__all__ = [
    "Resolved",
    "RunConfig",
    "RunSection",
    "allowed",
    "check_machine",
    "fields",
    "flatten",
    "from_options",
    "load",
    "method_names",
    "override",
    "recipe_names",
    "schema_of",
    "write",
]

RECIPES = Path(__file__).parent / "recipes"
METHODS = RECIPES / "methods"

SHORT = {"resume": "resume.checkpoint"}
"""Sections that stand for one of their keys where a value is given."""


@dataclass(frozen=True)
class Resolved:
    """A checked configuration and where each of its values came from."""

    config: RunConfig
    origins: Mapping[str, str]
    """Dotted key -> "default", "recipe NAME", "method NAME", "command line" or "derived: why"."""

    def leaves(self) -> Iterator[tuple[str, Any, str]]:
        """(key, value, origin) of every option, in the order of the sections."""
        values = dict(flatten(self.config.model_dump()))
        return ((key, values[key], self.origins[key]) for key in fields())


@dataclass(frozen=True)
class _Given:
    value: Any
    origin: str


def load(recipe: str | Path, overrides: Iterable[str] = ()) -> Resolved:
    """Read a recipe by name or path, with or without +METHOD, and apply `key=value` texts.

    Raises ConfigError, one line, for anything that is not a complete and consistent configuration.
    """
    given = _read_recipe(str(recipe), base=Path(), ancestors=())
    given |= dict(_parse_override(text) for text in overrides)
    if "run.dir" not in given:
        name = Path(str(recipe)).name.replace(".yaml", "").replace(".yml", "").replace("+", "-")
        given["run.dir"] = _Given(f"runs/{name}", "derived: = runs/<recipe>")
    config = _validate(given)
    return Resolved(config, _origins(config, given))


def from_options(options: Mapping[str, Any]) -> RunConfig:
    """The configuration whose options a checkpoint holds, by dotted key.

    An option that this version does not know any more is left out. Raises ConfigError.
    """
    known = fields()
    return _validate({k: _Given(v, "checkpoint") for k, v in options.items() if k in known})


def override(texts: Iterable[str]) -> dict[str, Any]:
    """The values of `key=value` texts by dotted key. Raises ConfigError."""
    return {key: given.value for key, given in map(_parse_override, texts)}


def write(resolved: Resolved, path: Path) -> None:
    """Write the configuration as YAML, with each value's origin as a comment.

    The file is itself a recipe that gives the same configuration.
    """
    lines: list[str] = []
    open_sections: list[str] = []
    for key, value, origin in resolved.leaves():
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                open_sections = sections[: depth + 1]
                lines.append(f"{'  ' * depth}{section}:")
        text = f"{'  ' * len(sections)}{name}: {yaml_subset.dump(value)}"
        lines.append(f"{text:<48}  # {origin}")
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(path)


def fields() -> dict[str, FieldInfo]:
    """Every option's dotted key and its declaration, in the order of the sections."""
    return dict(_fields(RunConfig, ""))


def recipe_names() -> list[str]:
    """The recipes that come with the program."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def method_names() -> list[str]:
    """The methods that can be laid over a recipe."""
    return sorted(path.stem for path in METHODS.glob("*.yaml"))


def _fields(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _read_recipe(name: str, base: Path, ancestors: tuple[Path, ...]) -> dict[str, _Given]:
    recipe, _, method = name.rpartition("+")
    if recipe and not _is_path(method):
        path = _find_method(method)
        tree = yaml_subset.read(path)
        inner = tree.pop("inner", None)
        given = _read_recipe(_variant(recipe, inner) if inner else recipe, base, ancestors)
        return given | _given(tree, path, f"method {method}")
    path = _find_recipe(name, base)
    if path in ancestors:
        chain = " -> ".join(str(p) for p in (*ancestors, path))
        raise ConfigError(f"recipes extend one another in a circle: {chain}")
    tree = yaml_subset.read(path)
    parent = tree.pop("extends", None)
    given = {}
    if parent is not None:
        given = _read_recipe(str(parent), path.parent, (*ancestors, path))
    return given | _given(tree, path, f"recipe {path.stem if path.parent == RECIPES else path}")


def _variant(name: str, inner: str) -> str:
    """The recipe that has the values of an inner optimizer: NAME is Muon's, NAME-adamw AdamW's."""
    stem, dot, suffix = name.partition(".y")
    stem = stem.removesuffix("-adamw")
    return f"{stem}{'-adamw' * (inner == 'adamw')}{dot}{suffix}"


def _given(tree: Mapping[str, Any], path: Path, origin: str) -> dict[str, _Given]:
    given = {}
    sections = {key.split(".")[0] for key in fields() if "." in key}
    tree = {key if isinstance(v, dict) else SHORT.get(key, key): v for key, v in tree.items()}
    for key, value in tree.items():
        if key in sections and not isinstance(value, dict):
            raise ConfigError(f"{path}: {key} is a section; write its keys indented below it")
    for key, value in flatten(tree):
        _check_known(key, f"{path}: ")
        given[key] = _Given(value, origin)
    return given


def _find_method(name: str) -> Path:
    path = METHODS / f"{name}.yaml"
    if path.is_file():
        return path
    known = method_names()
    raise ConfigError(
        f"method {name!r} is unknown{_nearest(name, known)}; there are {', '.join(known)}"
    )


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def _find_recipe(name: str, base: Path) -> Path:
    path = base / name if _is_path(name) else RECIPES / f"{name}.yaml"
    if path.is_file():
        return path.resolve()
    if path.parent != RECIPES:
        raise ConfigError(f"recipe {path} is not there")
    known = recipe_names()
    raise ConfigError(
        f"recipe {name!r} is unknown{_nearest(name, known)}; there are {', '.join(known)}, "
        "or give the path of a .yaml file"
    )


def _parse_override(text: str) -> tuple[str, _Given]:
    key, equals, raw = text.partition("=")
    if not equals:
        raise ConfigError(
            f"{text!r} is not of the form key=value"
            + (f"; give {key}=VALUE" if key in fields() else _nearest(key, fields()))
        )
    key = SHORT.get(key, key)
    _check_known(key, "")
    # A path such as 2024 stays a text.
    value = raw if fields()[key].annotation is str else yaml_subset.parse(raw, f"{key}={raw}")
    return key, _Given(value, "command line")


def _check_known(key: str, where: str) -> None:
    known = fields()
    if key in known:
        return
    if any(name.startswith(f"{key}.") for name in known):
        raise ConfigError(f"{where}{key} is a section; give one of its keys, as in {key}.NAME")
    hint = _nearest(key, known) or "; `python -m pretrain --help` lists the options"
    raise ConfigError(f"{where}option {key!r} is unknown{hint}")


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    same_name = [key for key in known if key.split(".")[-1] == name.split(".")[-1]]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6) or same_name
    return f"; did you mean {' or '.join(near)}?" if near else ""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each leaf."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _validate(given: Mapping[str, _Given]) -> RunConfig:
    tree: dict[str, Any] = {}
    for key, item in given.items():
        *parents, name = key.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = item.value
    for name, field in RunConfig.model_fields.items():
        if field.is_required():
            tree.setdefault(name, {})
    try:
        # JSON mode: strict about types, but a list may stand for a tuple.
        return RunConfig.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise ConfigError(_explain(error, given)) from None


def _explain(error: ValidationError, given: Mapping[str, _Given]) -> str:
    details = error.errors()
    missing = [_key(d["loc"]) for d in details if d["type"] == "missing"]
    if missing:
        return f"no value for {', '.join(missing)}; give it in the recipe or as {missing[0]}=VALUE"
    key = _key(details[0]["loc"])
    value, origin = given[key].value, given[key].origin
    schema = schema_of(key)
    nearest = _nearest(str(value), schema.get("enum", []))
    return f"{key}={yaml_subset.dump(value)} ({origin}): must be {allowed(schema)}{nearest}"


def _key(location: tuple[int | str, ...]) -> str:
    """The option's dotted key, without the positions inside a list or a union."""
    parts = [str(part) for part in location]
    known = fields()
    while ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts)


def schema_of(key: str) -> dict[str, Any]:
    """The JSON schema of one option."""
    whole = RunConfig.model_json_schema()
    schema: dict[str, Any] = whole
    for part in key.split("."):
        schema = schema["properties"][part]
        schema = _follow(schema, whole)
    if "items" in schema:
        return {**schema, "items": _follow(schema["items"], whole)}
    return schema


def _follow(schema: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    return whole["$defs"][schema["$ref"].split("/")[-1]] if "$ref" in schema else schema


def allowed(schema: Mapping[str, Any]) -> str:
    """What a JSON schema admits, in words."""
    if "anyOf" in schema:
        return " or ".join(allowed(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(str(choice) for choice in schema["enum"])
    if "properties" in schema:
        return f"a mapping of {', '.join(schema['properties'])}"
    if "prefixItems" in schema:
        return f"[{', '.join(allowed(item) for item in schema['prefixItems'])}]"
    if schema["type"] == "array":
        return f"a list, each {allowed(schema['items'])}"
    nouns = {
        "integer": "an integer",
        "number": "a number",
        "boolean": "true or false",
        "string": "a text",
        "null": "null",
    }
    if schema.get("minLength"):
        return "a text that is not empty"
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = [f"{sign} {schema[name]:g}" for name, sign in signs.items() if name in schema]
    return " ".join([nouns[schema["type"]], " and ".join(bounds)]).strip()


def _origins(config: RunConfig, given: Mapping[str, _Given]) -> dict[str, str]:
    values = dict(flatten(config.model_dump()))
    origins = {}
    for key, field in fields().items():
        if key in given and given[key].value is not None:
            origins[key] = given[key].origin
        elif values[key] is not None and field.default is None:
            why = config.derivations.get(key, field.json_schema_extra["derived"])
            origins[key] = f"derived: {why}"
        else:
            origins[key] = given[key].origin if key in given else "default"
    return origins
