"""YAML without its surprises: `no` is a text, 1e-3 a number, 1:30 a text, a key stands once."""

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from megatron_ext.errors import ConfigError

_Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the texts that the loader would take for something else."""

    yaml_implicit_resolvers: ClassVar[_Resolvers] = {}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[_Resolvers] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", node.value[index][0].start_mark
                )
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"null|~|", ["n", "~", ""]),
    ("bool", r"true|false", "tf"),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    ("float", r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", "-+.0123456789"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}",
            re.compile(rf"^(?:{_pattern})$", re.IGNORECASE),
            list(_first),
        )


def parse(text: str, where: str) -> Any:
    """One YAML value; `where` names the text in the ConfigError of a bad one."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark and "\n" in text else ""
        problem = getattr(error, "problem", None) or "not readable as text"
        raise ConfigError(f"{where}{line} is not valid YAML: {problem}") from None


def read(path: Path) -> dict[str, Any]:
    """A file that holds a mapping."""
    try:
        tree = parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"{path} must be a mapping of sections to options")
    return tree


def dump(value: Any) -> str:
    """The value as one line of YAML."""
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=10**6, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")
