"""Numbers in 16 and 8 bits."""

import pytest
import torch

from flash_train.optim.formats import (
    CODE_BLOCK,
    decode,
    dynamic_map,
    encode,
    join_master,
    random_words,
    round_stochastic,
    split_master,
)

CPU = torch.device("cpu")


def test_a_weight_and_its_lower_half_are_any_fp32_number():
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1_000_000,), generator=draw).to(torch.int32)
    special = [0x00000000, 0x7F800000, 0x7F7FFFFF, 0x7FFFFFFF, 0x7F800001, 0x3F808000, 0x3F818000, 0x00008000]
    bits = torch.cat([bits, torch.tensor([x - 2**31 * s for x in special for s in (0, 1)]).to(torch.int32)])
    master = bits.view(torch.float32)
    weight, lower = split_master(master)
    joined = join_master(weight, lower)
    assert torch.equal(joined.isnan(), master.isnan())
    assert torch.equal(joined.view(torch.int32)[~master.isnan()], bits[~master.isnan()])
    is_tie = bits & 0xFFFF == 0x8000
    nearest = master.to(torch.bfloat16)
    assert torch.equal(weight[~is_tie & ~master.isnan()], nearest[~is_tie & ~master.isnan()])


def test_stochastic_rounding_is_right_on_average():
    x = torch.tensor([1.0 + 2**-10, -3.1415927, 1e-30, 0.0, float("inf"), float("nan")])
    random = torch.arange(65536, dtype=torch.int32)
    rounded = round_stochastic(x[:, None].expand(6, 65536).contiguous(), random.expand(6, 65536))
    mean = rounded.double().mean(1)
    torch.testing.assert_close(mean[:4], x[:4].double(), rtol=1e-7, atol=0)
    assert mean[4].isinf() and rounded[5].isnan().all()
    assert all(len(rounded[i].unique()) == 2 for i in range(3))


def test_random_words_are_a_pure_function_of_the_place():
    options = {"seed": 2**40 + 5, "step": 3, "number": 2, "stream": 1, "device": CPU}
    words = random_words(10_000, **options)
    assert torch.equal(random_words(10_000 - 4096, block=2, **options), words[4096:])
    for name in ("seed", "step", "number", "stream"):
        assert (random_words(10_000, **{**options, name: options[name] + 1}) == words).sum() < 3
    assert words.min() >= 0 and words.max() < 2**32 and len(words.unique()) > 9_990
    assert words.double().mean().item() == pytest.approx(2**31, rel=0.02)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_values(signed):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 1024, generator=draw) * torch.exp(3 * torch.randn(64, 1024, generator=draw))
    x = x if signed else x.square()
    x[0, :256] = torch.linspace(0.98, 1.0, 256)  # between the two largest values
    code, scale = encode(x, signed=signed)
    assert code.dtype == torch.uint8 and scale.shape == (64, 4)
    assert torch.equal(scale, x.abs().unflatten(-1, (-1, CODE_BLOCK)).amax(-1))
    values, parts = (
        dynamic_map(signed).double(),
        (x.double().unflatten(-1, (-1, CODE_BLOCK)) / scale[..., None]).flatten(-2),
    )
    nearest = (parts[..., None] - values).abs().amin(-1)
    found = (parts - values[code.long()]).abs()
    # A square never becomes 0: the divisor of an update
    allowed = torch.full_like(found, 1e-7) if signed else torch.full_like(found, 3.26e-7)
    assert bool((found <= nearest + allowed).all())
    assert signed or bool((code[x > 0] > 0).all())
    torch.testing.assert_close(
        decode(code, scale, signed=signed),
        (values[code.long()].float().unflatten(-1, (-1, CODE_BLOCK)) * scale[..., None]).flatten(-2),
    )


@pytest.mark.parametrize("signed", [True, False])
def test_every_value_has_its_code(signed):
    values = dynamic_map(signed)
    assert len(values.unique()) == 256 and torch.equal(values, values.sort().values)
    code, scale = encode(values[None], signed=signed)
    assert torch.equal(code[0], torch.arange(256).to(torch.uint8)) and scale.item() == 1
    code, scale = encode(torch.zeros(2, 256), signed=signed)
    assert not decode(code, scale, signed=signed).any()


def test_the_map_is_that_of_8_bit_optimizers():
    """Some values of Dettmers' dynamic map, from its definition: midpoints of even divisions of each decade."""
    signed, unsigned = dynamic_map(True), dynamic_map(False)
    assert signed[127] == 0 and signed[255] == 1 and unsigned[0] == 0 and unsigned[255] == 1
    torch.testing.assert_close(signed[128], torch.tensor(0.55e-6))
    torch.testing.assert_close(signed[254], torch.tensor(1 - 0.45 / 64))
    torch.testing.assert_close(signed[0], torch.tensor(-(1 - 0.45 / 64)))
    torch.testing.assert_close(unsigned[1], torch.tensor(1e-6 * (0.1 + 0.225)))
