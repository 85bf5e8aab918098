"""`pretrain checkpoint export` on the folder of a real run, with the tokenizer that it names."""

import json
import pydoc_data.topics
from pathlib import Path

import pytest
import sentencepiece
import yaml

from pretrain.checkpoint import main
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import train
from tests.ranks import run

VOCABULARY = 400
TEXT = "The loss of  two spaces\n\tand 日本語 </s>"


@pytest.fixture(scope="module")
def a_run(tmp_path_factory) -> Path:
    """Trained on made-up tokens, which is nothing to the export; stopped inside a round."""
    folder = tmp_path_factory.mktemp("run")
    blend = write_corpus(folder)
    with (folder / "text.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(pydoc_data.topics.topics.values()),
            model_writer=file,
            vocab_size=VOCABULARY,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    content = yaml.safe_load(blend.read_text())
    content["tokenizer"] |= {"path": "text.model", "vocab_size": VOCABULARY, "eod": 2}
    blend.write_text(yaml.safe_dump(content))
    layout = {"parallel__replicas": 2, "parallel__tp": 2, "outer__interval": 2}
    options = {"model__vocab_size": VOCABULARY, "train__steps": 4, "train__stop_at": 3}
    train(blend, folder / "run", **layout, **options)
    return folder / "run"


def _load(rank: int, folder: Path) -> tuple[str, list[int], int, bool]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=5, do_sample=False)
    grown = answer.shape[1] > ids.shape[1]
    return str(model.dtype), ids[0].tolist(), model.config.eos_token_id, grown


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_run_loads_and_generates_in_transformers(a_run, tmp_path, capsys, dtype):
    output = tmp_path / "exported"
    assert main(["export", str(a_run), str(output), "--dtype", dtype, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    [(found, ids, end, grown)] = run(_load, 1, output)
    model = sentencepiece.SentencePieceProcessor(model_file=str(a_run.parent / "text.model"))
    assert (found, ids, end, grown) == (f"torch.{dtype}", model.encode(TEXT), 2, True)


def test_an_export_is_refused_in_one_line_and_leaves_nothing(a_run, tmp_path, capsys):
    step = a_run / "checkpoints/step-00000003"
    assert main(["export", str(step), str(tmp_path)]) == 2
    assert f"{tmp_path} exists already" in capsys.readouterr().err
    (a_run.parent / "text.model").rename(tmp_path / "elsewhere.model")
    assert main(["export", str(step), str(tmp_path / "new")]) == 3
    assert "text.model" in capsys.readouterr().err
    assert not list(tmp_path.glob("new*"))
    assert main(["export", str(step), str(tmp_path / "new"), "--no-tokenizer"]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    (tmp_path / "elsewhere.model").rename(a_run.parent / "text.model")
