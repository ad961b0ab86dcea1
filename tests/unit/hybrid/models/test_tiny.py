"""Tiny checkpoints: reproducible, decisive, and usable with a chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid.models.tiny import tiny_checkpoint


def test_same_seed_same_weights_and_no_global_random_state(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    paths = [tiny_checkpoint(tmp_path / str(i), seed=seed) for i, seed in enumerate((4, 4, 5))]
    assert torch.equal(state, torch.get_rng_state())
    one, same, other = (path.joinpath("model.safetensors").read_bytes() for path in paths)
    assert one == same
    assert one != other


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "ministral3"])
@pytest.mark.parametrize("tied", [False, True])
def test_argmax_is_decisive_and_varied(family: str, tied: bool, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, family, tie_word_embeddings=tied, tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))
    output = model.generate(tokens, max_new_tokens=40, do_sample=False)[:, 8:]
    assert output.shape == (4, 40)  # no EOS without a tokenizer
    assert min(len(set(row.tolist())) for row in output) >= 8
    with torch.no_grad():
        first, second = model(output).logits.topk(2).values.unbind(-1)
    assert (first - second).median() > 0.2


def test_the_tokenizer_round_trips_any_text_and_chats(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint(tmp_path))
    text = "héllo  wörld\n\n🎉 don't\t\x00"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    chat = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.eos_token_id] == [2]
    assert tokenizer.decode([2, *ids, 2], skip_special_tokens=True) == text
