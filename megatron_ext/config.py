"""The base of every configuration section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of options, declared in the file of the code that consumes it.

    The docstring under a field is what `--help` and `--show` print for it. Types are strict: a
    string is no number. A field that another value decides when it is not given carries
    `Field(None, json_schema_extra={"derived": "why"})`.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )
