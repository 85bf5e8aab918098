"""`checkpoint average`, `import`, `reshape` and `diff` on what real runs saved."""

import json
from pathlib import Path

import pytest
import torch

from megatron_ext.checkpoint.saved import Saved
from megatron_ext.errors import ConfigError
from pretrain.checkpoint import main
from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import lines, losses, train
from tests.ranks import run

MULOCO = {"parallel__replicas": 2, "outer__interval": 2, "train__steps": 4}


@pytest.fixture(scope="module")
def blend(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def a_run(blend, tmp_path_factory) -> Path:
    """Checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    train(blend, folder, checkpoint__every=2, **MULOCO)
    return folder


def command(capfd, *arguments: object) -> tuple[int, str, str]:
    """In a process of its own, because the writing commands make a process group."""
    capfd.readouterr()
    (code,) = run(lambda rank: main([str(argument) for argument in arguments]), 1)
    said = capfd.readouterr()
    return code, said.out, said.err


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(Saved(folder).global_weights())


def test_an_average_is_the_mean_and_begins_a_new_run(blend, a_run, tmp_path, capfd):
    steps = [a_run / f"checkpoints/step-0000000{step}" for step in (2, 4)]
    code, out, _ = command(capfd, "average", *steps, tmp_path / "mean", "--json")
    path = Path(json.loads(out)["path"])
    assert (code, path.name) == (0, "step-00000004")
    found, parts = weights(path), [weights(step) for step in steps]
    assert found.keys() == parts[0].keys()
    for name, tensor in found.items():
        expected = torch.stack([part[name].double() for part in parts]).mean(0).float()
        assert torch.equal(tensor, expected), name
    assert command(capfd, "verify", tmp_path / "mean")[0] == 0
    assert "weights_of" in command(capfd, "inspect", tmp_path / "mean")[1]
    train(blend, tmp_path / "new", resume__weights=tmp_path / "mean", **MULOCO)
    assert losses(tmp_path / "new")[0] < losses(a_run)[2]
    with pytest.raises(ConfigError, match=r"holds weights only.*resume\.weights="):
        train(blend, tmp_path / "other", resume=tmp_path / "mean", **MULOCO)


@pytest.mark.parametrize("model", [{}, {"model__sandwich_norm": False, "model__tie_head": True}])
def test_what_is_exported_comes_back_by_import(blend, tmp_path, capfd, model):
    train(blend, tmp_path / "run", train__steps=2, **model)
    exported, imported = tmp_path / "exported", tmp_path / "imported"
    assert command(capfd, "export", tmp_path / "run", exported, "--no-tokenizer")[0] == 0
    code, out, err = command(capfd, "import", exported, imported)
    assert code == 0, err
    assert "model.hidden=64" in out
    before = weights(tmp_path / "run/checkpoints/step-00000002")
    after = weights(imported / "step-00000000")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=1e-7)
    # And out again, from the folder that holds weights only.
    again = tmp_path / "again"
    assert command(capfd, "export", imported, again, "--no-tokenizer")[0] == 0
    one, other = (json.loads((f / "config.json").read_text()) for f in (exported, again))
    assert one == other
    options = {"resume__weights": imported, "train__steps": 1, **model}
    train(blend, tmp_path / "new", **options)
    assert lines(tmp_path / "new", "events")[0]["weights"].startswith(str(imported))


@pytest.fixture(scope="module")
def exported(a_run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "hf"
    assert run(lambda rank: main(["export", str(a_run), str(folder), "--no-tokenizer"]), 1) == [0]
    return folder


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architectures", ["LlamaForCausalLM"], "architecture LlamaForCausalLM"),
        ("hidden_activation", "gelu_pytorch_tanh", "hidden_activation=gelu_pytorch_tanh"),
        ("hidden_activation", None, "hidden_activation=None"),
        ("layer_types", ["sliding_attention"] * 4, "layer_types=['sliding_attention']"),
        ("layer_types", None, "layer_types=None"),
        ("attention_bias", True, "attention_bias=True"),
        ("query_pre_attn_scalar", 256, "query_pre_attn_scalar=256"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping=30.0"),
        ("head_dim", 32, "head_dim=32"),
        (
            "rope_parameters",
            {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope_type=yarn",
        ),
    ],
)
def test_a_model_with_another_feature_is_refused_by_its_name(
    exported, tmp_path, capfd, key, value, message
):
    config = json.loads((exported / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    for file in exported.glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    code, _, err = command(capfd, "import", tmp_path, tmp_path / "imported")
    assert code == 2
    assert message in err and len(err.splitlines()) == 1
    assert not (tmp_path / "imported").exists()


def test_a_weight_that_is_missing_or_too_many_is_named(exported, tmp_path, capfd):
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((exported / "config.json").read_text())
    whole = load_file(exported / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({k: v for k, v in whole.items() if k != name}, tmp_path / "model.safetensors")
    code, _, err = command(capfd, "import", tmp_path, tmp_path / "imported")
    assert code == 3 and name in err
    index = tmp_path / "model.safetensors.index.json"
    for damaged in ("{", "[]", '{"weight_map": 1}'):
        index.write_text(damaged)
        code, _, err = command(capfd, "import", tmp_path, tmp_path / "imported")
        assert code == 3 and f"{index.name} is damaged" in err
    index.unlink()
    bias = "model.layers.0.mlp.up_proj.bias"
    save_file(whole | {bias: torch.zeros(1)}, tmp_path / "model.safetensors")
    code, _, err = command(capfd, "import", tmp_path, tmp_path / "imported")
    assert code == 2 and bias in err


def test_reshape_says_by_which_rules_a_run_goes_on_elsewhere(a_run, capfd):
    code, out, _ = command(capfd, "reshape", a_run, "parallel.tp=2", "parallel.replicas=4")
    assert code == 0
    assert "the checkpoint holds whole matrices" in out and "nothing needs rewriting" in out
    code, _, err = command(capfd, "reshape", a_run, "parallel.tp=3")
    assert code == 2 and "must be a multiple of parallel.tp=3" in err
    code, out, err = command(capfd, "reshape", a_run, "train.seed=5", "--json")
    assert code == 2 and "resume.allow=[train.seed]" in err
    (found,) = json.loads(out)["findings"]
    assert (found["name"], found["effective"]) == ("train.seed", "refused")


def test_checkpoints_of_other_numbers_of_replicas_are_compared_and_not_called_damaged(
    blend, a_run, tmp_path, capfd
):
    train(blend, tmp_path, **MULOCO | {"parallel__replicas": 1})
    code, out, _ = command(capfd, "diff", a_run, tmp_path, "--json")
    rows = json.loads(out)["tensors"]
    assert code == 0
    only = {row["folder"] for row in rows if row["remark"] == "only in the first"}
    assert only == {"replica-1"}
    assert any(row["key"] == "anchor.embedding" and row["largest"] > 0 for row in rows)


def test_averaging_other_models_or_damaged_ones_is_refused(blend, a_run, tmp_path, capfd):
    train(blend, tmp_path / "wide", train__steps=1, model__ffn=128)
    code, _, err = command(capfd, "average", a_run, tmp_path / "wide", tmp_path / "mean")
    assert code == 2 and "is of another model" in err and "mlp.down differs" in err
    victim = next((tmp_path / "wide/checkpoints/step-00000001").glob("replica-0/*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1])
    code, _, err = command(capfd, "average", a_run, tmp_path / "wide", tmp_path / "mean")
    assert code == 3 and victim.name in err
