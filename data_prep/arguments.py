"""What a word on the command line may be, and a parser whose refusals say what was meant."""

import argparse
import difflib
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NoReturn

_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it, and what comes close."""

    def error(self, message: str) -> NoReturn:
        if choice := re.match(
            r"(argument .*: )?invalid choice: '(.*?)' \(choose from (.*)\)", message
        ):
            where, given, known = choice.groups()
            known = [word.strip("' ") for word in known.split(",")]
            message = (
                f"{where or ''}{given!r} is none of {', '.join(known)}{did_you_mean(given, known)}"
            )
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """End with the first argument that no option of this command takes."""
        given = unknown[0].partition("=")[0]
        known = [option for action in self._actions for option in action.option_strings]
        meant = did_you_mean(given, known) if given.startswith("-") else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")


def did_you_mean(given: str, known: Sequence[str]) -> str:
    """`; did you mean X?`, or nothing where nothing comes close."""
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 up")
    return int(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def size(text: str) -> int:
    """Bytes: `64M`, `1G` or a plain number, in powers of 1,024."""
    return _scaled(text, _SIZES, "size; write bytes, or 64M, 1G")


def count(text: str) -> int:
    """`300B`, `1.5T`, `2M` or a plain number, in powers of ten."""
    return _scaled(text, _COUNTS, "count; write 300B or 2.5M")


def _scaled(text: str, units: dict[str, int], what: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        value = Fraction(number) * units[unit]
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}") from error
    if value < 1 or value.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(value)


def shard(text: str) -> tuple[int, int]:
    index, slash, of = text.partition("/")
    if not (slash and index.isdecimal() and of.isdecimal() and int(index) < int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard; write 0/8 to 7/8")
    return int(index), int(of)


def weight(text: str) -> tuple[str, float]:
    prefix, _, share = text.rpartition("=")
    try:
        value = float(share)
    except ValueError:
        value = -1.0
    if not prefix or not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no PREFIX=SHARE with a share from 0 up")
    return prefix, value
