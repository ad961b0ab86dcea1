"""Every fixture of tests/golden (or `HYBRID_GOLDEN_DIR`) through the public API, float32.

A case passes when the tokens are those of the reference implementation and no more passes were run
than it ran. tests/golden/README.md says how the cases were made and how forwards are counted.
"""

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

from hybrid import HybridDecoder, Strategy, registry
from hybrid.errors import ConfigError

ROOT = Path(__file__).parents[2]
GOLDEN = Path(os.environ.get("HYBRID_GOLDEN_DIR") or ROOT / "tests" / "golden")
MODELS = sorted(path.parent for path in GOLDEN.glob("*/cases.json"))
CASES = [
    pytest.param(model, case, id=f"{model.name}-{case['id']}")
    for model in MODELS
    for case in json.loads((model / "cases.json").read_text())["cases"]
]
_decoders: dict[tuple, HybridDecoder] = {}


def decoder_of(model: Path, case: dict) -> HybridDecoder:
    parts = {}
    if case["preset"] == "dflash":
        parts["drafter"] = model / "drafter"
    if "lora" in case["params"]:
        parts["adapter"] = model / case["params"]["lora"]
    key = (model, *parts.values())
    if key not in _decoders:
        _decoders[key] = HybridDecoder.from_pretrained(model, dtype="float32", **parts)
    return _decoders[key]


def settings(case: dict) -> dict:
    ignores = "ignored" in case["eos"] and not case["params"].get("early_stop")
    parameters = {k: v for k, v in case["params"].items() if k != "lora"}
    return {
        "strategy": Strategy.preset(case["preset"], **parameters),
        "max_new_tokens": case["max_new_tokens"],
        "ignore_eos": ignores,
    }


def cut(tokens: list[int], eos: int, *, ignores: bool) -> list[int]:
    return tokens if ignores or eos not in tokens else tokens[: tokens.index(eos) + 1]


def test_there_are_fixtures():
    assert CASES, f"no */cases.json below {GOLDEN}"


@pytest.mark.parametrize(("model", "case"), CASES)
def test_tokens_and_number_of_forwards(model: Path, case: dict):
    decoder, asked = decoder_of(model, case), settings(case)
    result = decoder.generate(case["prompt"], **asked)
    eos = json.loads((model / "cases.json").read_text())["eos_token_id"]
    expected = cut(case["expected"], eos, ignores=asked["ignore_eos"])
    assert cut(list(result.token_ids), eos, ignores=asked["ignore_eos"]) == expected
    stats = result.stats
    assert stats.num_forwards <= case["model_calls"] - case.get("wasted_forwards", 0)
    assert stats.num_forwards == (
        stats.num_prefill_forwards
        + stats.num_draft_forwards
        + stats.num_verify_forwards
        + stats.num_denoise_forwards
    )


@pytest.mark.parametrize(("model", "case"), CASES)
def test_batched_equals_alone(model: Path, case: dict):
    """Rows of other lengths share the passes; each gets the tokens it gets alone."""
    decoder, asked = decoder_of(model, case), settings(case)
    prompt = case["prompt"]
    prompts = [prompt[: max(1, len(prompt) // 2)], prompt, [*prompt, *prompt[:3]]]
    together = decoder.generate(prompts, **asked)
    for row, shared in zip(prompts, together, strict=True):
        alone = decoder.generate(row, **asked)
        assert shared.token_ids == alone.token_ids
        if shared.stats.num_draft_forwards == 0:  # rows that draft share their draft passes
            assert shared.stats.num_forwards == alone.stats.num_forwards


@pytest.mark.skipif("HYBRID_GOLDEN_DIR" in os.environ, reason="the page is about our fixtures")
def test_the_page_gives_our_tokens_per_forward():
    """docs/papers.md: for each preset the tokens over all passes, ours and the reference's."""
    counts = defaultdict(lambda: [0, 0, 0, 0])
    for model, case in (parameter.values for parameter in CASES):
        stats = decoder_of(model, case).generate(case["prompt"], **settings(case)).stats
        reference = case["model_calls"] - case.get("wasted_forwards", 0)
        for i, n in enumerate((1, stats.num_new_tokens, stats.num_forwards, reference)):
            counts[case["preset"]][i] += n
    rows = [
        f"| `{preset}` | {cases} | {tokens / ours:.2f} | {tokens / theirs:.2f} |"
        for preset, (cases, tokens, ours, theirs) in sorted(counts.items())
    ]
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line in rows] == rows, "\n".join(rows)


SMALL = {"block_size": 4, "sub_block_size": 2, "window_size": 5, "steps": 4}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_preset_that_fits_takes_any_prompt(model: Path):
    """A mask id in the prompt is a token, the answer holds none, and its length is exact."""
    decoder = HybridDecoder.from_pretrained(model, dtype="float32")
    mask = decoder.backbone.mask_token_id
    cases = json.loads((model / "cases.json").read_text())["cases"]
    known = max((case["prompt"] for case in cases), key=len)
    prompts = [[known[0]], [*known[:3], mask or 1, known[-1]], [mask or 1] * 4]
    for name in set(decoder.strategies) - {"dflash", "guided"}:
        fields = registry.load("preset", name).model_fields
        parameters = {k: v for k, v in SMALL.items() if k in fields}
        if name in {"ar", "speculative", "fast-dllm"}:
            parameters.pop("steps", None)
        asked = {"strategy": Strategy.preset(name, **parameters), "ignore_eos": True}
        together = decoder.generate(prompts, max_new_tokens=7, **asked)
        for prompt, shared in zip(prompts, together, strict=True):
            assert len(shared.token_ids) == 7, name
            assert mask not in shared.token_ids, name
            alone = decoder.generate(prompt, max_new_tokens=7, **asked)
            assert alone.token_ids == shared.token_ids, name
            one = decoder.generate(prompt, max_new_tokens=1, **asked)
            assert len(one.token_ids) == 1, name


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_preset_that_the_model_cannot_run_is_refused(model: Path):
    decoder = HybridDecoder.from_pretrained(model, dtype="float32")
    if decoder.backbone.can_verify:
        wrong, reason = "llada", "context|mask token"
    else:
        wrong, reason = "speculative", "bidirectional|no autoregressive objective"
    with pytest.raises(ConfigError, match=reason) as refused:
        decoder.generate([1, 2, 3], strategy=wrong)
    assert "For this model: " in str(refused.value)
    for name in decoder.strategies:
        assert name in str(refused.value)
