"""Random tiny checkpoints for tests, examples and docs: a Hugging Face folder, no download.

The weights are drawn so that every part matters (norms, biases, late layers) and that the most
probable token is decisive and varied. Next: hybrid/models/loading.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_checkpoint(
    directory: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    vocab_size: int = 64,
    hidden_size: int = 64,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    rope: Mapping[str, Any] | None = None,
    tokenizer: bool = True,
    scale: float = 1.5,
    **overrides: Any,
) -> Path:
    """Write a random model, and a byte-level ChatML tokenizer, into `directory`.

    Args:
        directory: created when missing.
        family: any `model_type` that transformers knows as a causal language model.
        seed: of the weights; the global random state is left alone.
        vocab_size: raised to what the tokenizer needs when there is one.
        hidden_size: C.
        num_layers: L.
        num_heads: H.
        num_kv_heads: G.
        head_dim: D; None is hidden_size / num_heads.
        rope: transformers' `rope_parameters`.
        tokenizer: also write a tokenizer; `<|im_end|>` is then EOS, else there is none.
        scale: gain of the linear layers; larger is more decisive.
        overrides: further config fields (`tie_word_embeddings=True`, ...).

    Returns:
        The directory.
    """
    path = Path(directory)
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    known = AutoConfig.for_model(family)  # gpt2, say, knows no kv heads
    fields = {name: value for name, value in fields.items() if hasattr(known, name)}
    if head_dim is not None:
        fields["head_dim"] = head_dim
    if rope is not None:
        fields["rope_parameters"] = dict(rope)
    if tokenizer:
        tokens = byte_tokenizer()
        tokens.save_pretrained(path)
        fields["vocab_size"] = max(vocab_size, len(tokens))
        fields["eos_token_id"] = tokens.eos_token_id
    config = AutoConfig.for_model(family, **{**fields, **overrides})
    with torch.random.fork_rng(devices=[]):  # the classes draw weights of their own first
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, torch.Generator().manual_seed(seed), scale)
    model.save_pretrained(path)
    return path


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the 256 bytes and `SPECIAL_TOKENS` (ids 0, 1, 2)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokens = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    end_of_text, _, end_of_turn = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token=end_of_turn,
        pad_token=end_of_text,
        chat_template=CHAT_TEMPLATE,
    )


@torch.no_grad()
def _randomise(model: torch.nn.Module, generator: torch.Generator, scale: float) -> None:
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1 and name.endswith("bias"):
            weight.copy_(0.2 * noise)
        elif weight.ndim == 1:  # a norm's gain
            weight.add_(0.2 * noise)
        else:
            # Divided by the width, so that `scale` means the same for every size.
            weight.copy_(scale * noise / weight.shape[-1] ** 0.5)
