"""Codecs against their definitions in float64, value by value."""

import math

import pytest
import torch

from megatron_ext.diloco import codecs
from megatron_ext.diloco.codecs import reference
from megatron_ext.diloco.codecs.base import CHUNK_NUMEL
from megatron_ext.diloco.codecs.bits import pack_integers, unpack_integers
from megatron_ext.errors import ConfigError

UNIFORM = [
    {"kind": kind, "bits": bits, "per_row": per_row}
    for kind in ("linear", "statistical")
    for bits in (2, 4, 8)
    for per_row in (False, True)
]
ALL = [
    *UNIFORM,
    {"kind": "fp32"},
    {"kind": "bf16"},
    {"kind": "topk", "keep": 0.05},
    {"kind": "topk", "keep": 0.05, "chunk": 128},
]
SHAPES = [(64, 48), (3, 37), (41,), (1,), (1, 5), (9, 1), (CHUNK_NUMEL + 3,), (105, 333)]


def gaussian(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.01 + 0.001


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", ALL, ids=str)
def test_decoded_values_are_those_of_the_definition(options, shape):
    """A value within rounding of a bin's edge may fall on its other side."""
    tensor = gaussian(shape)
    codec = codecs.make(**options)
    packed = codec.encode(tensor)
    decoded = codec.decode(packed)
    expected = reference.round_trip(tensor, **options)
    assert decoded.dtype == torch.float32
    wrong = ~torch.isclose(decoded.double(), expected, rtol=1e-5, atol=1e-7)
    assert wrong.sum() <= 1e-4 * tensor.numel()
    # Such a value is as far from the one side as from the other.
    assert (decoded - tensor).double().norm() == pytest.approx(
        (expected - tensor.double()).norm().item(), rel=1e-4, abs=1e-8
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", ALL, ids=str)
def test_the_size_is_known_beforehand(options, shape):
    codec = codecs.make(**options)
    packed = codec.encode(gaussian(shape))
    assert packed.nbytes == packed.payload.numel() == codec.nbytes(shape)
    assert packed.payload.dtype == torch.uint8


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_value_takes_its_bits_and_little_more(bits):
    numel = 1024 * 1024
    for kind in ("linear", "statistical"):
        nbytes = codecs.make(kind, bits).nbytes((1024, 1024))
        assert nbytes <= numel * bits / 8 + 4 * 2**bits + 8
    assert codecs.make("linear", 4).nbytes((1024, 1024)) <= 0.53 * numel
    assert codecs.make("linear", bits, per_row=True).nbytes((1024, 1024)) == (
        numel * bits // 8 + 8 * 1024
    )


def test_top_k_positions_take_the_bits_that_a_chunk_needs():
    values = 64 * 16
    nbytes = codecs.make("topk", keep=1 / 64, chunk=4096).nbytes((16, 4096))
    assert nbytes == values * 4 + values * 12 // 8


@pytest.mark.parametrize(
    ("options", "mse"),
    [
        ({"kind": "linear", "bits": 2}, 0.478),
        ({"kind": "linear", "bits": 2, "per_row": True}, 0.186),
        ({"kind": "statistical", "bits": 2}, 0.175),
        ({"kind": "statistical", "bits": 2, "per_row": True}, 0.161),
        ({"kind": "linear", "bits": 4}, 0.0190),
        ({"kind": "linear", "bits": 4, "per_row": True}, 0.0071),
        ({"kind": "statistical", "bits": 4}, 0.0122),
        ({"kind": "statistical", "bits": 4, "per_row": True}, 0.0092),
    ],
    ids=str,
)
def test_distortion_of_gaussian_values_is_that_of_the_published_codecs(options, mse):
    codec = codecs.make(**options)
    found = []
    for seed in range(40):
        tensor = torch.randn(64, 48, generator=torch.Generator().manual_seed(seed))
        error = codec.decode(codec.encode(tensor)) - tensor
        found.append((error.square().mean() / tensor.var()).item())
    assert sum(found) / len(found) == pytest.approx(mse, rel=0.12)


@pytest.mark.parametrize("options", ALL, ids=str)
@pytest.mark.parametrize("value", [0.0, -3.0])
def test_equal_values_come_back(options, value):
    codec = codecs.make(**options)
    tensor = torch.full((8, 6), value)
    decoded = codec.decode(codec.encode(tensor))
    if options["kind"] == "topk":
        assert set(decoded.flatten().tolist()) <= {0.0, value}
    else:
        assert torch.equal(decoded, tensor)


def test_a_tensor_of_nothing_takes_no_bytes():
    for options in ALL:
        codec = codecs.make(**options)
        packed = codec.encode(torch.empty(0, 4))
        assert packed.nbytes == 0
        assert codec.decode(packed).shape == (0, 4)


@pytest.mark.parametrize("options", [o for o in UNIFORM if o["per_row"]], ids=str)
def test_a_row_wise_codec_may_be_cut_between_rows(options):
    codec, tensor = codecs.make(**options), gaussian((37, 19))
    whole = codec.decode(codec.encode(tensor))
    parts = [codec.decode(codec.encode(part)) for part in tensor.split([5, 1, 31])]
    assert torch.equal(whole, torch.cat(parts))


def test_bf16_and_fp32_are_what_torch_makes_of_them():
    tensor = gaussian((33, 7))
    bf16, fp32 = codecs.make("bf16"), codecs.make("fp32")
    assert torch.equal(bf16.decode(bf16.encode(tensor)), tensor.bfloat16().float())
    assert torch.equal(fp32.decode(fp32.encode(tensor)), tensor)


@pytest.mark.parametrize("bits", [1, 3, 12, 17])
def test_integers_of_any_width_survive_packing(bits):
    integers = torch.randint(2**bits, (101,), generator=torch.Generator().manual_seed(bits))
    packed = pack_integers(integers, bits)
    assert len(packed) == math.ceil(101 * bits / 8)
    assert torch.equal(unpack_integers(packed, bits, 101), integers)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "linear"}, "outer.bits of 2, 4 or 8"),
        ({"kind": "linear", "bits": 3}, "it is 3"),
        ({"kind": "topk"}, "outer.keep"),
        ({"kind": "topk", "keep": 0.0}, "it is 0.0"),
        ({"kind": "bf16", "bits": 4}, "outer.bits=4 is for outer.codec=linear or statistical"),
        ({"kind": "fp32", "per_row": True}, "outer.per_row=True is for"),
        ({"kind": "linear", "bits": 4, "keep": 0.1}, "outer.keep=0.1 is for outer.codec=topk"),
        ({"kind": "zip"}, "outer.codec=zip is unknown"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        codecs.make(**options)
