"""Where the tokens come from: the blend.yaml that data preparation leaves for training."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from megatron_ext.config import Section
from megatron_ext.errors import ConfigError, DataError
from pretrain import yaml_subset

Window = Annotated[tuple[NonNegativeInt, PositiveInt], Field(strict=False)]


class DataConfig(Section):
    """Where the tokens come from."""

    blend: str
    """Path of the blend.yaml that `python -m data_prep tokenize` wrote."""
    cache: str | None = Field(None, json_schema_extra={"derived": "= <run.dir>/index-cache"})
    """Folder for the sample indices."""
    skip: tuple[Window, ...] = Field((), strict=False)
    """Samples that are left out, for example around a loss spike: [first, first after it] pairs of
    numbers in the order of samples; `sample` in metrics.jsonl is where a step begins."""

    @model_validator(mode="after")
    def _check_skip(self) -> "DataConfig":
        bounds = [bound for window in self.skip for bound in window]
        if any(left >= right for left, right in pairwise(bounds)):
            raise ConfigError(
                f"data.skip={[list(window) for window in self.skip]}: must be pairs [first, first "
                "after it] of numbers of samples that rise from each to the next"
            )
        return self


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
        """Changes when the parts, their sizes or their weights do."""
        described = self.blend.model_dump_json(exclude={"tokenizer"})
        return hashlib.sha256(described.encode()).hexdigest()
