"""`--model hybrid` gives the numbers and the texts that lm-eval's own model "hf" gives."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusion_checkpoints import tiny_diffusion
from fakes import BYTES, EOS, text_decoder
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM

from hybrid import HybridDecoder
from hybrid.errors import CapacityError, ConfigError
from hybrid.lm_eval import HybridLM
from hybrid.models.loading import load_model
from hybrid.models.tiny import tiny_checkpoint

# By our own layers, by transformers' through its cache, and by one that takes nothing back.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("llama", {}),
    "foreign": ("gpt2", {}),
    "recurrent": ("mamba", {"state_size": 4}),
}
PAIRS = [
    ("2 + 2 =", " 4"),
    ("2 + 2 =", " 5"),
    ("2 + 2 =", " four"),
    ("spaces move over  ", "to here"),
    ("", "no context"),
    ("x", "y"),
    ("long " * 30, "and what follows"),
]
PROMPTS = ["One.", "Another prompt, which is longer.", "?"]


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[HFLM, HybridLM]:
    """One model behind lm-eval's own class and behind ours; 60 tokens make texts long."""
    family, fields = FAMILIES[request.param]
    path = str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), family, **fields))
    theirs = HFLM(pretrained=path, dtype="float32", device="cpu", max_length=60, batch_size=2)
    return theirs, HybridLM(path, max_length=60, strategy="ar", batch_size=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> HybridDecoder:
    return HybridDecoder.from_pretrained(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def _requests(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


def _generate(lm: Any, *prompts: str, **gen_kwargs: Any) -> list[str]:
    requests = _requests("generate_until", *((prompt, gen_kwargs) for prompt in prompts))
    answers: list[str] = lm.generate_until(requests, disable_tqdm=True)
    return answers


# ---- scores


def test_log_likelihoods_are_those_of_hf(models: tuple[HFLM, HybridLM]) -> None:
    theirs, ours = models
    requests = _requests("loglikelihood", *PAIRS)
    wanted, got = theirs.loglikelihood(requests), ours.loglikelihood(requests)
    assert [value for value, _ in got] == pytest.approx([value for value, _ in wanted], rel=1e-5)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in wanted]


def test_rolling_log_likelihoods_are_those_of_hf(models: tuple[HFLM, HybridLM]) -> None:
    theirs, ours = models
    requests = _requests("loglikelihood_rolling", ("short",), ("of several windows " * 9,))
    wanted = theirs.loglikelihood_rolling(requests)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(wanted, rel=1e-5)


def test_a_context_runs_once_for_all_its_continuations(
    tiny: HybridDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths, forward = [], tiny.backbone.forward
    monkeypatch.setattr(
        tiny.backbone,
        "forward",
        lambda ids, *rest, **named: widths.append(ids.shape[1]) or forward(ids, *rest, **named),
    )
    pairs = [("a context", "abc"), ("another", "x"), ("a context", "d"), ("a context", "e")]
    HybridLM(tiny).loglikelihood(_requests("loglikelihood", *pairs), disable_tqdm=True)
    # A context but its last token; then that token and a continuation but its last one. One pass
    # judges all that feed the same.
    assert widths == [8, 1 + len("ab"), 1, 6, 1]


def test_a_model_without_a_causal_pass_generates_and_is_not_scored(tmp_path: Path) -> None:
    sizes = {"vocab_size": 300, "embedding_size": 300, "mask_token_id": 299, "eos_token_id": EOS}
    backbone: Any = load_model(tiny_diffusion(tmp_path, "llada", **sizes)).backbone
    decoder = HybridDecoder(backbone, BYTES)
    lm = HybridLM(decoder, batch_size=2)
    wanted = [decoder.generate(prompt, max_new_tokens=16).text for prompt in PROMPTS]
    assert _generate(lm, *PROMPTS, max_gen_toks=16) == wanted
    assert "hybrid_tokens_per_forward" in lm.get_model_info()
    assert "hybrid_acceptance_length" not in lm.get_model_info()
    with pytest.raises(ConfigError, match="A causal pass of it says nothing"):
        lm.loglikelihood(_requests("loglikelihood", ("a", "b")))
    with pytest.raises(ConfigError, match="A causal pass of it says nothing"):
        lm.loglikelihood_rolling(_requests("loglikelihood_rolling", ("ab",)))


def test_a_continuation_that_fits_no_window_is_an_error(tiny: HybridDecoder) -> None:
    with pytest.raises(CapacityError, match=r"continuation of 9 tokens, expected at most .*\(8\)"):
        HybridLM(tiny, max_length=8).loglikelihood(_requests("loglikelihood", ("a", "b" * 9)))


# ---- answers


@pytest.mark.parametrize("gen_kwargs", [{}, {"until": ["e", "."]}, {"until": "o"}], ids=str)
def test_greedy_answers_are_those_of_hf(
    models: tuple[HFLM, HybridLM], gen_kwargs: dict[str, Any]
) -> None:
    theirs, ours = models
    wanted = _generate(theirs, *PROMPTS, max_gen_toks=24, do_sample=False, **gen_kwargs)
    assert _generate(ours, *PROMPTS, max_gen_toks=24, do_sample=False, **gen_kwargs) == wanted
    assert any(wanted)


@pytest.mark.parametrize(
    "options",
    [{"strategy": "ngram"}, {"strategy": "hybrid", "cost": "forwards"}, {"batch_size": "3"}],
    ids=str,
)
def test_a_strategy_that_verifies_answers_as_ar(
    options: dict[str, Any], tiny: HybridDecoder
) -> None:
    wanted = _generate(HybridLM(tiny, strategy="ar"), *PROMPTS, max_gen_toks=30)
    assert _generate(HybridLM(tiny, **options), *PROMPTS, max_gen_toks=30) == wanted


def test_the_run_is_counted_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = HybridLM(text_decoder("abcabcabcabcabcabc"), strategy="ngram")
    # lm-eval's command line turns it off.
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    with caplog.at_level(logging.INFO, "lm_eval"):
        assert _generate(lm, "?") == ["abcabcabcabcabcabc"]
    info = lm.get_model_info()
    assert info["hybrid_strategy"] == "ngram"
    assert info["hybrid_tokens_per_forward"] == info["hybrid_acceptance_length"] > 1.5
    message = f"strategy ngram: acceptance_length {info['hybrid_acceptance_length']:.3f}"
    assert message in caplog.text


def test_a_special_token_as_stop_string_ends_an_answer() -> None:
    ids = [*BYTES.encode("ab"), 0, *BYTES.encode("cd")]  # 0 is <|endoftext|>, which is not EOS
    assert ids[2] != EOS
    lm = HybridLM(text_decoder(ids))
    assert _generate(lm, "?", until=["<|endoftext|>"]) == ["ab"]
    assert _generate(lm, "?", until=["d"]) == ["abc"]


def test_the_eos_of_the_tokenizer_ends_an_answer_too() -> None:
    decoder = text_decoder([*BYTES.encode("ab"), EOS, *BYTES.encode("cd")])
    decoder.backbone.eos_token_ids = ()
    assert _generate(HybridLM(decoder), "?", max_gen_toks=5) == ["ab"]


def test_samples_follow_the_seed_of_lm_eval_and_differ(tiny: HybridDecoder) -> None:
    def sample(batch_size: int) -> list[str]:
        torch.manual_seed(5)
        lm = HybridLM(tiny, batch_size=batch_size)
        return _generate(lm, *["same"] * 3, do_sample=True, temperature=1.0, max_gen_toks=8)

    assert sample(1) == sample(3)
    assert len(set(sample(3))) == 3


def test_a_seed_of_the_request_is_heeded(tiny: HybridDecoder) -> None:
    first = _generate(HybridLM(tiny), "same", do_sample=True, seed=3, max_gen_toks=8)
    assert _generate(HybridLM(tiny), "same", do_sample=True, seed=3, max_gen_toks=8) == first


def test_a_long_prompt_loses_its_beginning(tiny: HybridDecoder) -> None:
    lm = HybridLM(tiny, max_length=20)
    assert _generate(lm, "lost" * 9 + "kept", max_gen_toks=16) == _generate(
        HybridLM(tiny), "kept", max_gen_toks=16
    )
    with pytest.raises(CapacityError, match="max_gen_toks: got 20, expected less than max_length"):
        _generate(lm, "x", max_gen_toks=20)


def test_a_cache_of_answers_gets_each_of_them(tiny: HybridDecoder, tmp_path: Path) -> None:
    lm = HybridLM(tiny)
    cached = CachingLM(lm, str(tmp_path / "answers.db"))
    wanted = lm.loglikelihood(_requests("loglikelihood", *PAIRS[:3]))
    texts = _generate(lm, *PROMPTS, max_gen_toks=4)
    assert len(cached.dbdict) == 6
    lm._decoder = None  # type: ignore[assignment] # nothing is asked again
    assert cached.loglikelihood(_requests("loglikelihood", *PAIRS[:3])) == wanted
    requests = [(prompt, {"max_gen_toks": 4}) for prompt in PROMPTS]
    assert cached.generate_until(_requests("generate_until", *requests)) == texts


# ---- prompts


def test_a_conversation_becomes_the_same_prompt_as_in_a_chat(tiny: HybridDecoder) -> None:
    lm = HybridLM(tiny)
    messages = [{"role": "user", "content": "Hello"}]
    assert tiny.tokenizer is not None
    assert lm.tok_encode(lm.apply_chat_template(messages)) == tiny.tokenizer.chat(messages)
    begun = [*messages, {"role": "assistant", "content": "The answer"}]
    assert lm.apply_chat_template(begun, False).endswith("The answer")
    assert lm.chat_template(True) == lm.tokenizer.chat_template


def test_a_first_token_that_the_template_wrote_is_not_added_again(tiny: HybridDecoder) -> None:
    lm = HybridLM(tiny)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "tokenizer", _WithBos())
        assert lm.tok_encode("<s>a") == ["<s>a", False]
        assert lm.tok_encode("a") == ["a", True]
        assert lm.tok_encode("a", add_special_tokens=False) == ["a", False]
        assert lm.prefix_token_id == 7


class _WithBos:
    bos_token, bos_token_id, eos_token_id = "<s>", 7, 8

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[Any]:
        return [text, add_special_tokens]


def test_a_text_without_context_begins_with_bos_or_eos(
    tiny: HybridDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = HybridLM(tiny)
    assert lm.prefix_token_id == lm.eot_token_id == EOS
    monkeypatch.setattr(lm, "tokenizer", SimpleNamespace(bos_token_id=None, eos_token_id=None))
    with pytest.raises(ConfigError, match="neither a BOS nor an EOS token"):
        _ = lm.prefix_token_id


# ---- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": "auto"}, "batch_size: got 'auto', expected a number from 1 on"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"drafter": "ngram"}, "got drafter beside a decoder, which has its own"),
        ({"strategy": "spekulative"}, "strategy: got 'spekulative'.*Did you mean 'speculative'"),
        ({"block_sise": 4}, "no parameter 'block_sise'.*Did you mean 'block_size'"),
        ({"strategy": "ar", "risk": 0.1}, "risk: got 0.1 for strategy 'ar', expected 'hybrid'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_model_args_that_mean_nothing_are_refused(
    options: dict[str, Any], message: str, tiny: HybridDecoder
) -> None:
    with pytest.raises(ConfigError, match=message):
        HybridLM(tiny, **options)


def test_a_model_needs_a_tokenizer_and_a_conversation_a_template(tiny: HybridDecoder) -> None:
    with pytest.raises(ConfigError, match="no tokenizer, and lm-eval sends text"):
        HybridLM(HybridDecoder(tiny.backbone))
    lm = HybridLM(tiny)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm.tokenizer, "chat_template", None)
        with pytest.raises(ConfigError, match="no chat template. Leave --apply_chat_template out"):
            lm.apply_chat_template([])
