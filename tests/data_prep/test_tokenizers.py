import importlib.util
import json
from pydoc_data import topics

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from sentencepiece import SentencePieceProcessor
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_prep.errors import UsageError
from data_prep.tokenizers import long_text
from data_prep.tokenizers.load import load_encoder
from tests.data_prep.helpers import SENTENCEPIECE, TEKKEN, VOCABULARIES

SPECIALS = "a </s> b <s> <|endoftext|> [INST] <unk>"
ATOMS = " |  |\n|\t|a|Ab|9|12345|é|日本|▁|▁x|'s|.|\u00a0|\u2028|\u200b|🙂|</s>|x y|5 a|A 1"
HOSTILE = st.lists(st.sampled_from([*ATOMS.split("|"), "\x00", "\x1c"]), max_size=40).map("".join)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A byte-level BPE as GPT-2's, trained here, with the files that a model's folder holds."""
    folder = tmp_path_factory.mktemp("byte-level")
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.train_from_iterator(
        [json.__doc__, np.__doc__, st.__doc__ or ""],
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<|endoftext|>", "<s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    model.enable_truncation(4)
    model.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|endoftext|>"}, "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def encoders(byte_level):
    paths = {
        **{path.name: path for path in VOCABULARIES.iterdir() if ".model." in path.name},
        "tekken": TEKKEN,
        "huggingface": byte_level,
    }
    return {name: load_encoder(path) for name, path in paths.items()}


def test_sentencepiece_ids_are_the_models_own(encoders):
    model = SentencePieceProcessor(model_file=str(SENTENCEPIECE))
    for text in (SPECIALS, "one\ntwo  three\t", " "):
        expected = [*model.encode(text), model.eos_id()]
        assert encoders[SENTENCEPIECE.name].encode([text])[0].tolist() == expected


def test_tekken_ids_are_those_of_mistral_common(encoders):
    reference = Tekkenizer.from_file(TEKKEN)
    for text in (SPECIALS, "one\ntwo  three\t", "ᚠᛇᚻ 日本", " "):
        expected = reference.encode(text, bos=False, eos=True)
        assert encoders["tekken"].encode([text])[0].tolist() == expected
    assert encoders["tekken"].eod == reference.eos_id
    assert encoders["tekken"].tokenizer.vocab_size == reference.n_words


def test_tekken_reaches_ids_that_need_int32(encoders):
    ids = encoders["tekken"].encode(["Широкая электрификация 日本語の文章"])[0]
    assert ids.dtype == np.int32 and ids.max() > 65_535


def test_special_tokens_that_a_text_spells_stay_text(encoders):
    for encoder in encoders.values():
        ids = encoder.encode([SPECIALS])[0].tolist()
        assert ids.count(encoder.eod) == 1 and ids[-1] == encoder.eod
        assert encoder.tokenizer.decode(ids[:-1]) == SPECIALS


def test_a_truncation_stored_in_a_tokenizer_json_is_not_applied(encoders):
    assert len(encoders["huggingface"].encode(["word " * 50])[0]) > 50


def test_bos_comes_only_when_asked_for(byte_level):
    assert load_encoder(SENTENCEPIECE).encode(["a"])[0].tolist()[0] != 1
    assert load_encoder(SENTENCEPIECE, bos="auto").encode(["a"])[0].tolist()[0] == 1
    assert load_encoder(SENTENCEPIECE, bos="<unk>", eod="<s>").encode([""])[0].tolist() == [0, 1]
    own = load_encoder(byte_level, bos="auto")
    assert own.encode([""])[0].tolist() == [own.tokenizer.id_of("<s>"), own.eod]


@pytest.mark.parametrize(
    ("bos", "eod", "message"),
    [
        (None, "<|endoftext|>", "--eod '<|endoftext|>': .* has no such piece"),
        (None, "32000", "--eod 32000: .* has ids 0 to 31999"),
        ("<bos>", None, "--bos '<bos>': .* has no such piece"),
    ],
)
def test_a_special_token_that_the_vocabulary_lacks_is_refused(bos, eod, message):
    with pytest.raises(UsageError, match=message.replace("|", r"\|")):
        load_encoder(SENTENCEPIECE, bos, eod)


def test_a_vocabulary_without_an_eos_of_its_own_wants_one_named(byte_level, tmp_path):
    alone = tmp_path / "tokenizer.json"
    alone.write_bytes((byte_level / "tokenizer.json").read_bytes())
    with pytest.raises(UsageError, match=r"--eod: .* defines none of its own"):
        load_encoder(alone)
    assert load_encoder(alone, eod="<|endoftext|>").eod == 0


def test_an_eod_that_texts_can_spell_is_refused():
    with pytest.raises(UsageError, match="gets the EOD id"):
        load_encoder(SENTENCEPIECE, eod="▁the").identity()


def test_the_probe_says_what_is_lost(tmp_path):
    from tests.data_prep.tiny_models import lossy_model

    kept = load_encoder(SENTENCEPIECE).identity().probe_kept
    assert all(kept.values())
    lost = load_encoder(lossy_model(tmp_path / "lossy.model")).identity().probe_kept
    assert not any(lost.values())


def test_something_else_is_not_a_tokenizer(tmp_path):
    for name, content in {
        "a.json": b'{"a": 1}',
        "b.model": b"junk",
        "c": b"YQ== 0\nYg== 1\n",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=name):
            load_encoder(tmp_path / name)


def test_tiktoken_ranks_get_llama_3s_special_tokens(tmp_path):
    import base64

    ranks = [bytes([i]) for i in range(256)] + [b"x%d" % i for i in range(128_000 - 256)]
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"".join(base64.b64encode(r) + b" %d\n" % i for i, r in enumerate(ranks)))
    encoder = load_encoder(path)
    assert (encoder.eod, encoder.tokenizer.vocab_size) == (128_001, 128_256)
    assert encoder.encode(["a b"])[0].tolist() == [97, 32, 98, 128_001]


def test_every_real_vocabulary_can_be_cut(encoders):
    cuts = {name: encoder.tokenizer.space_at_cut for name, encoder in encoders.items()}
    assert cuts.pop("tekken") == cuts.pop("huggingface") == "keep"
    assert set(cuts.values()) == {"drop"}


@settings(max_examples=300)
@given(text=HOSTILE, size=st.integers(1, 8))
def test_a_text_in_pieces_has_the_ids_of_one_call(encoders, text, size):
    for name, encoder in encoders.items():
        tokenizer = encoder.tokenizer
        pieces = long_text.pieces(text, tokenizer.space_at_cut, size)
        joined = np.concatenate(tokenizer.encode(pieces)).tolist()
        assert joined == tokenizer.encode([text])[0].tolist(), name


def test_a_vocabulary_whose_pieces_span_words_is_not_cut(tmp_path):
    from tests.data_prep.tiny_models import model_across_words

    encoder = load_encoder(model_across_words(tmp_path / "across.model"))
    assert encoder.tokenizer.space_at_cut is None
    assert long_text.pieces("a b " * 100_000, None, 256) == ["a b " * 100_000]


def test_a_run_of_a_million_spaces_does_not_stop_tiktoken(encoders):
    text = "x" + " " * 1_200_000 + "y"
    ids = encoders["tekken"].encode([text])[0]
    assert encoders["tekken"].tokenizer.decode(ids[:-1].tolist()) == text


@given(text=HOSTILE)
def test_a_long_run_of_spaces_has_the_ids_of_one_call(encoders, text):
    tokenizer = encoders["tekken"].tokenizer
    assert tokenizer._encode_one(text, 2).tolist() == tokenizer._encode_plain(text).tolist()


def test_the_fast_back_end_gives_the_ids_of_the_reference(encoders):
    pytest.importorskip("gigatoken", reason="gigatoken is optional: pip install gigatoken")
    fast = load_encoder(SENTENCEPIECE, backend="gigatoken")
    texts = [SPECIALS, *topics.topics.values()]
    expected = [ids.tolist() for ids in encoders[SENTENCEPIECE.name].encode(texts)]
    assert [ids.tolist() for ids in fast.encode(texts)] == expected


def test_a_fast_back_end_that_is_missing_or_unfit_is_refused_by_name():
    with pytest.raises(UsageError, match="--backend gigatoken: runs SentencePiece models only"):
        load_encoder(TEKKEN, backend="gigatoken")
    if importlib.util.find_spec("gigatoken") is None:
        with pytest.raises(UsageError, match="--backend gigatoken: needs the package gigatoken"):
            load_encoder(SENTENCEPIECE, backend="gigatoken")


def test_a_fast_back_end_that_differs_on_a_sample_ends_the_run(tmp_path):
    pytest.importorskip("gigatoken", reason="gigatoken is optional: pip install gigatoken")
    from data_prep.tokenizers.fast import CheckedFastTokenizer
    from data_prep.tokenizers.sentencepiece_model import SentencePieceTokenizer
    from tests.data_prep.tiny_models import faithful_model

    other = SentencePieceTokenizer(faithful_model(tmp_path / "other.model"))
    with pytest.raises(UsageError, match="gives other ids than the reference"):
        CheckedFastTokenizer(SENTENCEPIECE, other)


@pytest.mark.parametrize("unit", [" ", "a", "\n", "lorem ipsum dolor\n"])
@pytest.mark.parametrize(
    "name",
    [
        SENTENCEPIECE.name,
        pytest.param("tekken", marks=pytest.mark.slow),
        pytest.param("huggingface", marks=pytest.mark.slow),
    ],
)
def test_five_megabytes_of_anything_come_back(encoders, name, unit):
    text = "x" + unit * (5_000_000 // len(unit)) + "y"
    if name == "huggingface" and unit == "a":
        text = text[:300_000]  # the library needs minutes for one word of 5 MB
    encoder = encoders[name]
    ids = encoder.encode([text])[0]
    assert encoder.tokenizer.decode(ids[:-1].tolist()) == text
