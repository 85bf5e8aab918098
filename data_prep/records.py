"""One line of input becomes a text, a skip, or a named defect."""

import json

# Skipped and counted, not defects.
BLANK_LINE = "blank-line"
EMPTY_TEXT = "empty-text"
NOT_SAMPLED = "not-sampled"
DUPLICATE = "duplicate"
OTHER_LANGUAGE = "other-language"
TOO_SHORT = "too-short"
TOO_LONG = "too-long"
REPEATED_LINES = "repeated-lines"
REPEATED_PARAGRAPHS = "repeated-paragraphs"
REPEATED_NGRAMS = "repeated-ngrams"
# Defects: `--bad-records` says what happens.
INVALID_UTF8 = "invalid-utf8"
INVALID_JSON = "invalid-json"
NOT_AN_OBJECT = "not-an-object"
MISSING_TEXT = "missing-text"
NULL_TEXT = "null-text"
TEXT_NOT_A_STRING = "text-not-a-string"
LONE_SURROGATE = "lone-surrogate"
OVER_LONG = "over-long"

BAD_REASONS = frozenset(
    {
        INVALID_UTF8,
        INVALID_JSON,
        NOT_AN_OBJECT,
        MISSING_TEXT,
        NULL_TEXT,
        TEXT_NOT_A_STRING,
        LONE_SURROGATE,
        OVER_LONG,
    }
)


class Skipped(Exception):
    """A record that gives no document. `reason` is one of the constants of this module."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    @property
    def is_bad(self) -> bool:
        return self.reason in BAD_REASONS


def text_of_line(line: bytes | None, column: str) -> str:
    """The text of one JSON line (None stands for an over-long one).

    Raises:
        Skipped: the line holds no text that can be encoded.
    """
    if line is None:
        raise Skipped(OVER_LONG, "longer than --max-record-bytes")
    try:
        decoded = line.decode()
    except UnicodeDecodeError as error:
        raise Skipped(INVALID_UTF8, f"byte {error.start} of the line: {error.reason}") from error
    if not decoded.strip(" \t\r"):
        raise Skipped(BLANK_LINE)
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        raise Skipped(INVALID_JSON, str(error)) from error
    if not isinstance(record, dict):
        raise Skipped(NOT_AN_OBJECT, f"a JSON {type(record).__name__}")
    if column not in record:
        raise Skipped(
            MISSING_TEXT, f"no {column!r}, but {', '.join(sorted(record)[:8]) or 'nothing'}"
        )
    return checked(record[column], column)


def checked(text: object, column: str) -> str:
    """`text` if it is a string that has bytes; Skipped otherwise."""
    if text is None:
        raise Skipped(NULL_TEXT, f"{column!r} is null")
    if not isinstance(text, str):
        raise Skipped(TEXT_NOT_A_STRING, f"{column!r} is a {type(text).__name__}")
    if not text:
        raise Skipped(EMPTY_TEXT)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Skipped(LONE_SURROGATE, f"character {error.start} of the text") from error
    return text
