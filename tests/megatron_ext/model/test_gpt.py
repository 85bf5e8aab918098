"""What cannot work is refused by name, and building says nothing."""

import pytest
from megatron.core.extensions.transformer_engine import HAVE_TE

from megatron_ext import host
from megatron_ext.errors import ConfigError
from megatron_ext.model import logical_shapes, parameter_count, skeleton, transformer_config
from megatron_ext.replicas import ParallelConfig
from tests.megatron_ext.model.step import model_config


def config(model=None, parallel=None):
    return transformer_config(
        model or model_config(), parallel or ParallelConfig(), precision="bf16", recompute="none"
    )


def test_context_parallelism_on_plain_layers_is_refused():
    with pytest.raises(ConfigError, match=r"parallel\.cp=2 .*implementation=plain"):
        config(parallel=ParallelConfig(cp=2))


def test_document_masking_on_transformer_engine_is_refused():
    model = model_config(implementation="transformer_engine", document_masking=True)
    with pytest.raises(ConfigError, match=r"document_masking=true .*transformer_engine"):
        config(model)


def test_key_heads_that_cut_a_row_in_two_are_refused():
    with pytest.raises(ConfigError, match=r"parallel\.tp=8 .* 20 rows .*kv_heads=1"):
        config(model_config(hidden=16, heads=8, kv_heads=1), ParallelConfig(tp=8))


@pytest.mark.skipif(HAVE_TE, reason="Transformer Engine is here")
def test_transformer_engine_that_is_not_installed_is_refused():
    host.prepare()
    with pytest.raises(ConfigError, match="Transformer Engine is not installed"):
        skeleton(model_config(implementation="transformer_engine"))


def test_building_warns_of_nothing(recwarn, caplog):
    host.prepare()
    skeleton(model_config())
    assert [str(warning.message) for warning in recwarn] == []
    assert caplog.text == ""


@pytest.mark.parametrize("tie_head", [False, True])
@pytest.mark.parametrize("sandwich_norm", [False, True])
def test_parameters_are_those_of_the_logical_matrices(sandwich_norm, tie_head):
    host.prepare()
    model = model_config(kv_heads=2, sandwich_norm=sandwich_norm, tie_head=tie_head)
    numbers = [shape[0] * (shape[1:] or (1,))[0] for shape in logical_shapes(model).values()]
    assert parameter_count(model) == sum(numbers)
