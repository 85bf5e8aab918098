"""Where the tokens come from: the blend.yaml that data preparation leaves for training."""

import hashlib
import json
from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from megatron_ext.config import Section
from megatron_ext.errors import ConfigError, DataError
from pretrain import yaml_subset


class DataConfig(Section):
    """Where the tokens come from."""

    blend: str
    """Path of the blend.yaml that `python -m data_prep tokenize` wrote."""
    cache: str | None = Field(None, json_schema_extra={"derived": "= <run.dir>/index-cache"})
    """Folder for the sample indices."""


class Tokenizer(Section):
    """What training needs to know of the tokenizer."""

    kind: str
    path: str
    fingerprint: str
    vocab_size: PositiveInt
    eod: NonNegativeInt


class Part(Section):
    """One indexed dataset and its share of the samples."""

    prefix: str
    """Relative to the blend.yaml; with .bin and .idx."""
    weight: PositiveFloat
    documents: PositiveInt
    tokens: PositiveInt


class Blend(Section):
    """Contents of a blend.yaml."""

    format: int
    tokenizer: Tokenizer
    train: tuple[Part, ...] = Field(min_length=1)
    validation: tuple[Part, ...] = ()


class BlendFile:
    """A blend.yaml that was read and whose binaries are there."""

    def __init__(self, path: Path):
        """Raises ConfigError if there is no such file, DataError for what is wrong with it."""
        if path.is_dir():
            raise ConfigError(f"data.blend={path} is a folder; give {path / 'blend.yaml'}")
        if not path.is_file():
            raise ConfigError(
                f"data.blend={path} is not there; `python -m data_prep tokenize` writes it"
            )
        self.path = path
        try:
            # JSON mode: strict about types, but a list may stand for a tuple.
            self.blend = Blend.model_validate_json(json.dumps(yaml_subset.read(path)))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise DataError(f"{path}: {place or 'the file'}: {first['msg']}") from None
        if self.blend.format != 1:
            raise DataError(f"{path}: format {self.blend.format} is unknown; this program reads 1")
        for part in (*self.blend.train, *self.blend.validation):
            for file in self.files(part):
                if not file.is_file():
                    raise DataError(
                        f"{file} is not there, but {path} names it; tokenise again, or mend the "
                        "prefix"
                    )

    def files(self, part: Part) -> tuple[Path, Path]:
        """The .bin and .idx of a part."""
        prefix = self.path.parent / part.prefix
        return prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")

    def prefixes(self, parts: tuple[Part, ...]) -> tuple[list[str], list[float]]:
        """Prefixes and weights as megatron-core takes a blend."""
        return [str(self.path.parent / p.prefix) for p in parts], [p.weight for p in parts]

    @property
    def fingerprint(self) -> str:
        """Changes when the tokenizer, or the parts, their sizes or their weights do."""
        described = self.blend.model_dump_json(exclude={"tokenizer": {"path"}})
        return hashlib.sha256(described.encode()).hexdigest()
