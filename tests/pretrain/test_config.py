"""What a recipe and overrides become, and how a wrong one is refused."""

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import ConfigError
from megatron_ext.model.accelerators import fused_gradients
from pretrain.config import RECIPES, check_machine, fields, load, method_names, recipe_names, write
from pretrain.yaml_subset import dump, parse


def refusal(*overrides: str, recipe: str = "demo") -> str:
    with pytest.raises(ConfigError) as caught:
        load(recipe, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_resolves(name):
    resolved = load(name)
    assert resolved.config.run.dir == f"runs/{name}"
    assert set(resolved.origins) == set(fields())


def test_each_value_knows_where_it_came_from():
    resolved = load("demo", ["train.steps=20", "model.kv_heads=2"])
    origins = resolved.origins
    assert resolved.config.train.steps == 20
    assert origins["train.steps"] == "command line"
    assert origins["model.kv_heads"] == "command line"
    assert origins["model.hidden"] == "recipe demo"
    assert origins["parallel.tp"] == "default"
    assert origins["run.dir"].startswith("derived")
    assert load("demo").origins["model.kv_heads"] == "derived: = model.heads"
    assert resolved.config.data.cache == "runs/demo/index-cache"


def test_the_later_override_wins():
    assert load("demo", ["train.steps=20", "train.steps=30"]).config.train.steps == 30


def test_written_configuration_is_a_recipe_of_itself(tmp_path):
    resolved = load("demo", ["optimizer.lr=1e-3", "run.dir=2024", "resume=no"])
    path = tmp_path / "config.yaml"
    write(resolved, path)
    again = load(path)
    assert again.config == resolved.config
    assert again.config.run.dir == "2024"
    assert "# command line" in path.read_text()
    assert yaml.safe_load(path.read_text())["optimizer"]["lr"] == 1e-3


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(alphabet=st.characters(exclude_categories=["C", "Z"])),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    )
)
def test_dumped_values_are_read_back(value):
    assert parse(dump(value), "") == value


def test_recipe_extends_another(tmp_path):
    (tmp_path / "base.yaml").write_text("extends: demo\ntrain: {steps: 7}\n")
    child = tmp_path / "child.yaml"
    child.write_text("extends: ./base.yaml\noptimizer: {lr: 1e-2}\n")
    resolved = load(child)
    assert resolved.config.train.steps == 7
    assert resolved.config.optimizer.lr == 0.01
    assert resolved.config.model.hidden == 128
    assert resolved.origins["train.steps"] == f"recipe {tmp_path / 'base.yaml'}"
    assert resolved.origins["model.hidden"] == "recipe demo"


@pytest.mark.parametrize("method", sorted({*method_names()} - {"fp8"}))
@pytest.mark.parametrize("recipe", ["demo", "416m"])
def test_every_method_can_be_laid_over_a_recipe(recipe, method):
    resolved = load(f"{recipe}+{method}", ["data.blend=b"])
    config = resolved.config
    inner = "adamw" if "diloco" in method or "adamw" in method else "muon"
    assert config.optimizer.name == inner
    of_recipe = load(recipe if inner == "muon" else f"{recipe}-adamw", ["data.blend=b"]).config
    assert config.optimizer.lr == of_recipe.optimizer.lr
    assert config.model == of_recipe.model
    assert (config.outer.interval > 0) == ("loco" in method)
    assert (config.outer.fragments > 1) == ("streaming" in method)
    assert (config.optimizer.averaging.decay > 0) == ("gpa" in method)
    if not method.endswith("loco"):
        assert config.parallel.replicas == 1
        assert resolved.origins["parallel.replicas"] == f"method {method}"
    assert config.run.dir == f"runs/{recipe}-{method}"


def test_methods_may_follow_one_another():
    config = load("416m+streaming-diloco+fp8").config
    assert (config.optimizer.name, config.outer.fragments) == ("adamw", 3)
    assert (config.fp8.format, config.model.implementation) == ("hybrid", "transformer_engine")
    # The later one decides.
    assert load("demo+streaming-muloco+data-parallel-muon").config.outer.interval == 0


def test_method_of_one_replica_takes_what_is_published_for_one():
    resolved = load("416m+muloco-1")
    assert (resolved.config.outer.lr, resolved.config.outer.momentum) == (0.7, 0.6)
    assert resolved.origins["outer.lr"] == "derived: MuLoCo at K=1, arXiv 2505.23725"
    between = load("demo+diloco-1", ["parallel.replicas=4"])
    assert "between DiLoCo's at K=1 and K=8" in between.origins["outer.momentum"]


def test_method_over_a_recipe_in_a_file(tmp_path):
    folder = tmp_path / "a+b"
    folder.mkdir()
    (folder / "mine.yaml").write_text("extends: demo\n")
    (folder / "mine-adamw.yaml").write_text("extends: demo-adamw\noptimizer: {lr: 0.004}\n")
    assert load(folder / "mine.yaml").config.optimizer.name == "muon"
    assert load(f"{folder}/mine.yaml+diloco").config.optimizer.lr == 0.004
    (folder / "mine-adamw.yaml").unlink()
    assert "mine-adamw.yaml is not there" in refusal(recipe=f"{folder}/mine.yaml+diloco")


def test_unknown_method_gets_the_nearest_name():
    assert "did you mean streaming-muloco?" in refusal(recipe="demo+streaming-muloko")


def test_averaging_and_an_outer_step_exclude_each_other():
    message = refusal("optimizer.averaging.decay=0.9")
    assert "optimizer.averaging.decay=0.9 with outer.interval=10" in message


def test_recipes_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: ./b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: ./a.yaml\n")
    assert "circle" in refusal(recipe=str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("train.global_bach=2", "did you mean train.global_batch?"),
        ("optimiser.lr=2", "did you mean optimizer.lr?"),
        ("lr=2", "did you mean optimizer.lr or outer.lr?"),
        ("zzz=2", "--help"),
        ("model=2", "is a section"),
        ("train.steps", "key=value"),
        ("model.hidden=[1", "not valid YAML"),
        ("train.steps=ten", "train.steps=ten (command line): must be an integer > 0"),
        ("train.steps=0", "must be an integer > 0"),
        ("train.micro_batch=true", "must be an integer > 0"),
        ("model.tie_head=1", "must be true or false"),
        ("optimizer.name=moun", "must be muon or adamw; did you mean muon?"),
        ("optimizer.momentum=1", "must be a number ≥ 0 and < 1"),
        ("optimizer.lr=1e999", "must be a number > 0"),
        ("run.dir=", "must be a text that is not empty"),
        ("optimizer.schedule=wsd", "needs optimizer.decay_steps"),
        ("optimizer.decay_steps=3", "is wsd's"),
        ("train.stop_at=161", "after the last step"),
    ],
)
def test_wrong_option_is_one_line_with_what_is_allowed(override, hint):
    assert hint in refusal(override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.hidden=130"], "model.hidden=130 must be a multiple of model.heads=4"),
        (["model.hidden=12"], "even width"),
        (["model.kv_heads=3"], "must be a multiple of model.kv_heads=3"),
        (["parallel.tp=3"], "model.vocab_size=1024 must be a multiple of parallel.tp=3"),
        (["parallel.tp=8"], "model.heads=4 must be a multiple of parallel.tp=8"),
        (["parallel.pp=3"], "model.layers=4 must be a multiple of parallel.pp × parallel.inter"),
        (["parallel.pp=2", "parallel.interleave=4"], "model.layers=4 must be a multiple of"),
        (["parallel.interleave=2"], "needs parallel.pp"),
        (
            ["parallel.pp=2", "parallel.interleave=2", "train.micro_batch=32"],
            "micro-batches in multiples of parallel.pp=2",
        ),
        (["parallel.sequence_parallel=true"], "needs parallel.tp"),
        (
            ["parallel.tp=2", "parallel.sequence_parallel=true", "model.sequence_length=127"],
            "model.sequence_length=127 must be a multiple of parallel.tp=2",
        ),
        (["model.experts=1"], "leaves no choice; use 0 for a dense model"),
        (["model.experts=3", "model.experts_per_token=4"], "must not exceed model.experts=3"),
        (["model.experts=4", "parallel.tp=2"], "needs parallel.sequence_parallel=true"),
        (["parallel.dp=2", "parallel.ep=2"], "parallel.ep=2 with model.experts=0: a dense model"),
        (
            ["model.experts=3", "parallel.dp=2", "parallel.ep=2"],
            "parallel.ep=2 does not divide model.experts=3",
        ),
        (
            ["model.experts=4", "parallel.dp=2", "parallel.ep=4"],
            "parallel.ep=4 does not divide parallel.dp × parallel.cp=2",
        ),
        (
            ["model.experts=4", "fp8.format=e4m3", "fp8.backend=emulate"],
            "experts are not computed in FP8 here; use fp8.format=none",
        ),
        (
            ["model.experts=4", "model.implementation=transformer_engine"],
            "experts are plain here; use model.implementation=plain",
        ),
        (["parallel.replicas=3"], "train.global_batch=32 must be a multiple of"),
        (["parallel.replicas=2", "outer.interval=0"], "use parallel.dp"),
        (
            ["optimizer.schedule=wsd", "optimizer.decay_steps=151"],
            "optimizer.decay_steps=151 must not exceed train.steps=160",
        ),
        (["parallel.cp=2"], "needs model.implementation=transformer_engine"),
        (["model.layers=2", "outer.fragments=5"], "outer.fragments=5 would leave some empty"),
        (
            ["model.layers=2", "outer.fragments=4", "outer.fragment_order=strided"],
            "outer.fragment_order=strided use at most 3",
        ),
        (
            ["parallel.pp=2", "model.tie_head=true", "train.overlap=true"],
            "refuses train.overlap=true",
        ),
    ],
)
def test_combination_that_cannot_work_names_the_options(overrides, message):
    assert message in refusal(*overrides)


def test_recipe_errors_name_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    for text, hint in [
        ("extends: demo\nmodel: {hiden: 3}\n", "did you mean model.hidden?"),
        ("extends: demo\nmodel: 3\n", "is a section"),
        ("extends: demo\ntrain: {steps: 1, steps: 2}\n", "'steps' stands twice"),
        ("- 1\n", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("extends: demo\ntrain: {steps: ten}\n", "must be an integer"),
    ]:
        path.write_text(text)
        message = refusal(recipe=str(path))
        assert str(path) in message, message
        assert hint in message
    path.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refusal(recipe=str(path))


def test_missing_options_are_listed_together(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {layers: 2}\n")
    message = refusal(recipe=str(path))
    assert "model.hidden" in message
    assert "optimizer.lr" in message
    assert "data.blend" in message


def test_unknown_recipe_gets_the_nearest_name():
    assert "did you mean demo?" in refusal(recipe="dmo")
    assert "is not there" in refusal(recipe="nowhere/mine.yaml")


def test_every_option_has_a_line_of_documentation():
    assert [key for key, field in fields().items() if not field.description] == []


def test_recipes_lie_where_they_are_looked_for():
    assert (RECIPES / "demo.yaml").is_file()


def test_resume_alone_is_short_for_its_checkpoint(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: demo\nresume: none\n")
    assert load(recipe, ["data.blend=a"]).config.resume.checkpoint == "none"
    resolved = load(recipe, ["data.blend=a", "resume=runs/a", "resume.fallback=true"])
    assert resolved.config.resume.checkpoint == "runs/a"
    assert resolved.origins["resume.checkpoint"] == "command line"
    with pytest.raises(ConfigError, match=r"resume\.weights=b with resume\.checkpoint=runs/a"):
        load(recipe, ["data.blend=a", "resume=runs/a", "resume.weights=b"])


def test_fused_gradients_stay_off_without_apex_on_a_gpu_whose_layers_could_do_without(monkeypatch):
    """Megatron-core's head would refuse them at the start of every such run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fused_gradients(None) is False


def test_fused_gradients_are_refused_by_name_where_they_are_missing():
    config = load("demo", ["train.fused_gradients=true"]).config
    with pytest.raises(ConfigError, match=r"train\.fused_gradients=true needs a GPU and apex's"):
        check_machine(config)
    check_machine(load("demo").config)
    check_machine(load("demo", ["train.fused_gradients=false"]).config)
