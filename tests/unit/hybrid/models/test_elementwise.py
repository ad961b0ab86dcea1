"""Norm, rotation and gate beside what they should be, as they are and compiled."""

from __future__ import annotations

import shutil
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from fakes import tiny_backbone

from hybrid import HybridDecoder
from hybrid.errors import ConfigError
from hybrid.models.elementwise import Elementwise, gate, norm, rotate
from hybrid.models.tiny import tiny_checkpoint

needs_a_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("has_update", [False, True])
def test_norm(has_update):
    x, update, weight = draw(5, 12), draw(5, 12, seed=1), draw(12, seed=2)
    h, total = norm(x, update if has_update else None, weight, 1e-5)
    expected = x.double() + (update.double() if has_update else 0)
    torch.testing.assert_close(total.double(), expected)
    scale = (expected.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(h.double(), expected / scale * weight.double())


def test_rotation_turns_pairs_of_the_two_halves():
    x, angle = draw(3, 2, 8), draw(3, 4, seed=1)
    turned = torch.polar(torch.ones(3, 1, 4), angle[:, None]) * torch.complex(
        x[..., :4], x[..., 4:]
    )
    cos, sin = angle.cos(), angle.sin()
    own = x.clone()
    rotate(own, torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None])
    torch.testing.assert_close(own, torch.cat([turned.real, turned.imag], -1))


@pytest.mark.parametrize("exact", [False, True])
def test_gate(exact):
    for rows, size in ((1, 3), (7, 48), (40, 1536)):
        x = draw(rows, 2 * size)
        expected = F.silu(x[:, :size].double()) * x[:, size:].double()
        ours = Elementwise(exact=exact).gate(x.clone()).double()
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


# Compiled


@needs_a_compiler
def test_compiled_they_are_the_same_within_rounding():
    made = Elementwise(compiled=True)
    for rows in (1, 3, 8):
        x, update, weight = draw(rows, 16), draw(rows, 16, seed=1), draw(16, seed=2)
        for own in (None, update):
            for ours, plain in zip(
                made.norm(x, own, weight, 1e-5), norm(x, own, weight, 1e-5), strict=True
            ):
                torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)
        torch.testing.assert_close(made.gate(x), gate(x), rtol=0, atol=1e-5)
        heads = draw(rows, 5, 8)
        ours, plain = heads.clone(), heads.clone()
        angles = draw(rows, 1, 8, seed=3)
        made.rotate(ours[:, :3], angles.cos(), angles.sin())
        rotate(plain[:, :3], angles.cos(), angles.sin())
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)
        assert torch.equal(ours[:, 3:], heads[:, 3:])


@needs_a_compiler
def test_a_model_decodes_compiled(tmp_path):
    """All of its layers' small operations, in few compilations, and what it says is the same."""
    path = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    plain = HybridDecoder.from_pretrained(path, dtype="float32", device="cpu")
    own = HybridDecoder.from_pretrained(path, dtype="float32", device="cpu", compile=True)
    request = {"max_new_tokens": 12, "temperature": 0, "strategy": "ar"}
    expected = plain.generate([[3, 1, 4], [5, 9]], **request)
    torch._dynamo.utils.counters.clear()
    assert [r.token_ids for r in own.generate([[3, 1, 4], [5, 9]], **request)] == [
        r.token_ids for r in expected
    ]
    stats = torch._dynamo.utils.counters["stats"]
    assert 3 <= stats["unique_graphs"] <= 12
    torch._dynamo.reset()


def test_by_default_nothing_is_compiled():
    backbone = tiny_backbone("llama")
    assert backbone.elementwise.norm is norm
    assert backbone.elementwise.rotate is rotate
    assert backbone.elementwise.gate is gate


def test_what_cannot_be_compiled_is_refused_before_anything_is_decoded(tmp_path):
    path = tiny_checkpoint(tmp_path / "native", "llama", tokenizer=False)
    with pytest.raises(ConfigError, match="together with exact"):
        HybridDecoder.from_pretrained(path, exact=True, compile=True)
    foreign = tiny_checkpoint(tmp_path / "foreign", "gpt2", tokenizer=False)
    with pytest.raises(ConfigError, match="compile: it needs a model that the native backbone"):
        HybridDecoder.from_pretrained(foreign, compile=True)

    def fail(*_, **__):
        def function(*_):
            raise RuntimeError("no C++ compiler was found")

        return function

    with (
        mock.patch.object(torch, "compile", fail),
        pytest.raises(ConfigError, match=r"no C\+\+ compiler was found\n.*Leave compile out"),
    ):
        HybridDecoder.from_pretrained(path, compile=True)
