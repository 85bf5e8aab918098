"""Training samples from indexed binaries."""

from pydantic import Field

from megatron_ext.config import Section


class DataConfig(Section):
    """Where the tokens come from."""

    blend: str
    """Path of the blend.yaml that `python -m data_prep tokenize` wrote."""
    cache: str | None = Field(None, json_schema_extra={"derived": "= <run.dir>/index-cache"})
    """Folder for the sample indices."""
