"""What else a call of `generate` may ask for: streams, ends, outputs, and what our loop leaves."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_drafters import sometimes_wrong
from plug_models import (
    PAD,
    prompts,
    random_network,
    save_random_adapter,
    texts,
    tiny_model,
)
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    TextIteratorStreamer,
)

from hybrid.errors import ConfigError
from hybrid.models.dflash_files import save_dflash
from hybrid.models.tiny import byte_tokenizer
from hybrid.plug import Plug, PlugWarning, attach, detach

NEW = 20


class Listener:
    """A streamer that remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.given.append(value.tolist())

    def end(self) -> None:
        self.given.append("end")


def with_answers(model: PreTrainedModel, batch: int, **options: Any) -> tuple[Any, Any, Plug]:
    """Return a call, what transformers answers, and a plug whose drafter is sometimes right."""
    inputs = prompts(batch)
    call = {**inputs, "max_new_tokens": NEW, "do_sample": False, **options}
    want = model.generate(**call)
    sequences = want if isinstance(want, Tensor) else want.sequences
    return call, want, attach(model, drafter=sometimes_wrong(texts(inputs, sequences), 5))


# Streams


@pytest.mark.parametrize("batch", [1, 3])
def test_a_streamer_hears_what_transformers_would_tell_it(batch: int) -> None:
    model, ours, theirs = tiny_model(), Listener(), Listener()
    eos = [5, 6, 7, 8, 9, 10]  # rows end at different lengths
    call, _, plug = with_answers(model, batch, eos_token_id=eos)
    model.generate(**call, streamer=ours)
    assert sum(row.num_accepted for row in plug.stats) > 0
    detach(model)
    model.generate(**call, streamer=theirs)
    assert ours.given == theirs.given
    assert ours.given[0] == call["input_ids"].tolist()


def test_text_arrives_in_another_thread() -> None:
    model, tokenizer = tiny_model(vocab_size=259), byte_tokenizer()
    attach(model, drafter="ngram")
    streamer = TextIteratorStreamer(tokenizer, timeout=20.0)
    call = {**prompts(1), "max_new_tokens": 12, "do_sample": False}
    thread = threading.Thread(target=model.generate, kwargs={**call, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(model.generate(**call)[0])


class Failing(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise ArithmeticError


def test_a_stream_ends_when_the_call_fails() -> None:
    model, listener = tiny_model(), Listener()
    attach(model, drafter="ngram")
    with pytest.raises(ArithmeticError):
        model.generate(**prompts(1), streamer=listener, logits_processor=[Failing()])
    assert listener.given[1:] == ["end"]


# Ends


class AfterMultiple(StoppingCriteria):
    """Ends row b of a batch behind a multiple of b + 5; counts how often it is asked."""

    def __init__(self, batch: int) -> None:
        self.batch, self.asked = batch, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert len(input_ids) == self.batch
        self.asked += 1
        return input_ids[:, -1] % torch.arange(5, 5 + self.batch) == 0


@pytest.mark.parametrize("batch", [1, 3])
def test_a_criterion_ends_a_row_at_the_same_token(batch: int) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [1, 2]
    call, want, plug = with_answers(model, batch, stopping_criteria=[AfterMultiple(batch)])
    assert want.shape[1] < call["input_ids"].shape[1] + NEW, "nothing ended"
    criterion = AfterMultiple(batch)
    got = model.generate(**{**call, "stopping_criteria": [criterion]})
    assert torch.equal(got, want)
    assert criterion.asked == sum(row.num_new_tokens for row in plug.stats)
    assert sum(row.num_accepted for row in plug.stats) > 0


def test_rows_end_at_any_of_several_ids_and_are_padded() -> None:
    model = tiny_model()
    call, want, _ = with_answers(model, 3, eos_token_id=list(range(8, 16)))
    assert (want[:, -1] == PAD).any()
    assert torch.equal(model.generate(**call), want)
    # Without an id for padding, transformers pads with the first that ends a row.
    model.generation_config.pad_token_id = None
    got = model.generate(**call)
    detach(model)
    assert torch.equal(got, model.generate(**call))
    assert (got[:, -1] == 8).any()


def test_limits() -> None:
    model = tiny_model()
    call, _, plug = with_answers(model, 3)
    for limits in ({"max_length": 30}, {"max_new_tokens": 1}, {"min_length": 30, "max_length": 33}):
        options = {**call, "max_new_tokens": None, **limits}
        got = model.generate(**options)
        assert torch.equal(got, type(model).generate(model, **options))
        assert plug.stats[0].num_new_tokens == got.shape[1] - call["input_ids"].shape[1]


def test_stop_strings() -> None:
    model, tokenizer = tiny_model(vocab_size=259), byte_tokenizer()
    call, want, _ = with_answers(model, 1)
    answer = [tokenizer.decode([token]) for token in want[0, -NEW:].tolist()]
    string = next(text for text in answer[2:] if text.isascii() and text.isprintable() and text)
    options = {**call, "stop_strings": [string], "tokenizer": tokenizer}
    stock = type(model).generate(model, **options)
    assert stock.shape[1] < want.shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlugWarning)
        assert torch.equal(model.generate(**options), stock)
        del options["tokenizer"]
        with pytest.raises(ValueError, match="tokenizer"):
            model.generate(**options)


# Outputs


def test_a_dict_is_returned_to_who_asks_for_one() -> None:
    model = tiny_model()
    call, want, plug = with_answers(model, 3, return_dict_in_generate=True)
    got = model.generate(**call)
    assert type(got) is type(want)
    assert torch.equal(got.sequences, want.sequences)
    assert [row.num_new_tokens for row in plug.stats] == [NEW] * 3
    assert plug.stats[0].acceptance_length > 1


def test_a_config_and_positional_arguments_are_heeded() -> None:
    model = tiny_model()
    config = GenerationConfig(max_new_tokens=7, repetition_penalty=2.0, pad_token_id=PAD)
    ids = prompts(1)["input_ids"]
    want = model.generate(ids, config)
    attach(model)
    assert torch.equal(model.generate(ids, config), want)
    assert torch.equal(model.generate(inputs=ids, generation_config=config), want)


# What transformers' own loop does


LEFT: dict[str, dict[str, Any]] = {
    "beam": {"num_beams": 2},
    "use_cache": {"use_cache": False},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "cache_implementation": {"cache_implementation": "static"},
    "past_key_values": {"past_key_values": DynamicCache},
    "custom_generate": {"custom_generate": lambda model, input_ids, **_: input_ids},
    "assisted": {"prompt_lookup_num_tokens": 3},
    "assistant_model": {"assistant_model": tiny_model},
    "right": {"attention_mask": torch.tensor([[1] * 15 + [0]])},
    "position_ids": {"position_ids": torch.arange(3, 19)[None]},
    "max_length": {"max_length": 600, "max_new_tokens": None, "max_time": 0.05, "eos_token_id": 1},
    "Guidance": {"guidance_scale": 1.5},
    "stop_strings": {"generation_config": GenerationConfig(stop_strings=["x"], pad_token_id=PAD)},
}


def made(options: dict[str, Any]) -> dict[str, Any]:
    """Make anew what a call uses up."""
    return {n: v() if v is DynamicCache or v is tiny_model else v for n, v in options.items()}


@pytest.mark.parametrize("reason", LEFT)
def test_other_algorithms_are_left_to_transformers(reason: str) -> None:
    model, listener = tiny_model(), Listener()
    call = {**prompts(1), "max_new_tokens": 6, "do_sample": False, "streamer": listener}
    if reason in {"beam", "custom_generate"}:
        del call["streamer"]
    if reason == "stop_strings":
        call["tokenizer"] = byte_tokenizer()
    plug = attach(model)
    with pytest.warns(PlugWarning, match=reason):
        got = model.generate(**{**call, **made(LEFT[reason])})
    assert plug.stats == ()
    assert "streamer" not in call or listener.given.count("end") == 1
    if reason == "max_length":  # how far it gets is a matter of time
        return
    want = type(model).generate(model, **{**call, **made(LEFT[reason])})
    sequences = [out if isinstance(out, Tensor) else out.sequences for out in (got, want)]
    assert torch.equal(*sequences)


def test_a_batch_whose_rows_go_on_past_their_end_is_left_too() -> None:
    model, call = tiny_model(), {**prompts(2), "max_new_tokens": NEW, "do_sample": False}
    call["stopping_criteria"] = [AfterMultiple(2)]
    want = model.generate(**call)
    attach(model)
    with pytest.warns(PlugWarning, match="without an end-of-sequence id"):
        assert torch.equal(model.generate(**call), want)


def test_a_hole_in_the_mask_is_no_token() -> None:
    model = tiny_model()
    call = {**prompts(3), "max_new_tokens": NEW, "do_sample": False}
    call["attention_mask"][0, -3] = 0
    want = model.generate(**call)
    attach(model, drafter="ngram")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlugWarning)
        assert torch.equal(model.generate(**call), want)


# The model


def test_detach_gives_back_what_was_there() -> None:
    model = tiny_model()

    def mine(*args: Any, **kwargs: Any) -> str:
        return "mine"

    model.generate = mine
    attach(model)
    attach(model, drafter="ngram")  # replaces the first
    assert isinstance(model.generate(**prompts(1), max_new_tokens=2), Tensor)
    detach(model)
    assert model.generate is mine
    detach(model)
    assert model.generate is mine


def test_new_weights_are_noticed() -> None:
    model, call = tiny_model(), {**prompts(3), "max_new_tokens": NEW, "do_sample": False}
    plug = attach(model)
    first = model.generate(**call)
    flipped = {name: value.flip(0).clone() for name, value in model.state_dict().items()}
    model.load_state_dict(flipped, assign=True)
    got = model.generate(**call)
    assert not torch.equal(got, first)
    assert torch.equal(got, type(model).generate(model, **call))
    handle = model.model.layers[1].register_forward_hook(lambda module, args, out: 2 * out)
    got = model.generate(**call)
    assert "hook" in str(plug.why_not_native)
    assert torch.equal(got, type(model).generate(model, **call))
    handle.remove()


class Negated(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def negate(mlp: torch.nn.Module) -> None:
    weight = mlp.down_proj.weight
    mlp.down_proj = Negated(weight.shape[1], weight.shape[0], bias=False)
    mlp.down_proj.weight = weight  # the very tensor


def add_bias(mlp: torch.nn.Module) -> None:
    mlp.down_proj.bias = torch.nn.Parameter(torch.linspace(-1, 1, len(mlp.down_proj.weight)))


def other_activation(mlp: torch.nn.Module) -> None:
    mlp.act_fn = torch.nn.Tanh()


@pytest.mark.parametrize("change", [negate, add_bias, other_activation])
@pytest.mark.parametrize("is_first", [True, False])
def test_changed_modules_run_by_their_own_code(change: Any, is_first: bool) -> None:
    model, call = tiny_model(), {**prompts(3), "max_new_tokens": NEW, "do_sample": False}
    before = model.generate(**call)
    if is_first:
        change(model.model.layers[1].mlp)
    plug = attach(model)
    if not is_first:
        change(model.model.layers[1].mlp)
    want = type(model).generate(model, **call)
    assert not torch.equal(want, before)
    assert torch.equal(model.generate(**call), want)
    assert str(plug.why_not_native).startswith("model.layers.1.mlp.")


def test_frequencies_that_were_rounded_with_the_weights_are_the_models() -> None:
    """As by `model.bfloat16()`; here coarser, so that a short text shows it."""
    model, call = tiny_model(), {**prompts(3), "max_new_tokens": NEW, "do_sample": False}
    plug, rotary = attach(model), model.model.rotary_emb
    exact = model.generate(**call)
    rotary.inv_freq = rotary.inv_freq.to(torch.float8_e4m3fn).float()
    want = type(model).generate(model, **call)
    assert not torch.equal(want, exact)
    assert torch.equal(model.generate(**call), want)
    assert plug.why_not_native is None


def test_a_plug_that_no_longer_fits_says_so_at_every_call(tmp_path: Path) -> None:
    model = tiny_model()
    attach(model, adapter=save_random_adapter(tmp_path))
    model.double()
    for _ in range(2):
        with pytest.raises(ConfigError, match="self-diffusion needs the native backbone"):
            model.generate(**prompts(1), max_new_tokens=4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_a_plug_of_its_own(copied: Any, tmp_path: Path) -> None:
    model, call = tiny_model(), {**prompts(3), "max_new_tokens": NEW, "do_sample": False}
    save_dflash(tmp_path, random_network(model), torch.float32)
    plug = attach(model, drafter=tmp_path)
    want = model.generate(**call)
    twin = copied(model)
    assert torch.equal(twin.generate(**call), want)
    own = twin.generate.__self__
    assert own.model is twin
    assert own.stats[0].num_drafted == plug.stats[0].num_drafted > 0
    with torch.no_grad():
        twin.model.norm.weight.copy_(torch.linspace(-2, 2, len(twin.model.norm.weight)))
    assert not torch.equal(twin.generate(**call), want)
    assert torch.equal(model.generate(**call), want)


def test_the_mode_of_the_model_is_its_own() -> None:
    model = tiny_model("gpt2").train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    attach(model)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"drafter": "nothing"}, "nothing"),
        ({"strategy": "llada"}, "llada"),
        ({"strategy": "dflash"}, "dflash"),
        ({"num_draft_tokens": 0}, "num_draft_tokens"),
        ({"drafter": 3}, "drafter"),
    ],
)
def test_what_cannot_be_is_refused_at_once(options: dict[str, Any], match: str) -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match=match):
        attach(model, **options)
    assert "generate" not in vars(model)


def test_other_models_are_refused() -> None:
    wrong: Sequence[Any] = ("a name", torch.nn.Linear(1, 1))
    for model in wrong:
        with pytest.raises(ConfigError, match="causal language model"):
            attach(model)
