"""HFBackbone beyond the common contract: what it refuses, loads, and can only decode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid import HybridDecoder
from hybrid.attention.pattern import AttentionPattern, bidirectional, causal, padded, tree
from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.hf import HFBackbone
from hybrid.models.tiny import tiny_checkpoint
from hybrid.protocols import Entry
from hybrid.types import Write

TOKENS = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(3))
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "state-space": ("mamba", {"state_size": 4}),
    "convolution": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
}


def load(directory: Path, family: str, **fields: Any) -> HFBackbone:
    path = tiny_checkpoint(directory, family, **{"tokenizer": False, **fields})
    return HFBackbone.from_path(path, "cpu", torch.float32)


def run(
    backbone: HFBackbone, cache: Any, tokens: Tensor, row: int = 0, write: Write = Write.COMMIT
) -> Tensor:
    """Logits [T, V] of a causal pass over tokens [T]."""
    start = cache.lengths[row]
    positions = torch.arange(start, start + len(tokens))[None]
    pattern = causal((start,), len(tokens))
    output = backbone.forward(tokens[None], positions, pattern, cache, (row,), write=write)
    assert output.logits is not None
    return output.logits[0]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> HFBackbone:
    return load(tmp_path_factory.mktemp("gpt2"), "gpt2")


# ---- decoding


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gpt_neo", {"attention_types": [[["global", "local", "local"], 1]], "window_size": 6}),
        ("gemma3_text", {"sliding_window": 6, "tie_word_embeddings": False}),
        RECURRENT["convolution"],
    ],
    ids=["gpt_neo", "gemma3", "lfm2"],
)
def test_greedy_decoding_equals_generate(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    backbone = load(tmp_path, family, **fields)
    want = backbone.model.generate(TOKENS[:1, :5], max_new_tokens=25, do_sample=False)[0, 5:]
    cache, got = backbone.new_cache(1, 40), []
    logits = run(backbone, cache, TOKENS[0, :5])
    for _ in range(25):
        got.append(int(logits[-1].argmax()))
        logits = run(backbone, cache, torch.tensor(got[-1:]))
    assert got == want.tolist()
    assert len(set(got)) > 3


@pytest.mark.parametrize("name", RECURRENT)
def test_the_prompt_of_a_recurrent_model_is_one_pass(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.models.hf.PREFILL_CHUNK", 6)
    family, fields = RECURRENT[name]
    backbone = load(tmp_path, family, **fields)
    want = backbone.model.generate(TOKENS[:1], max_new_tokens=8, do_sample=False)[0, 40:]
    result = HybridDecoder(backbone).generate(TOKENS[0].tolist(), max_new_tokens=8, strategy="ar")
    assert list(result.token_ids) == want.tolist()


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_model_decodes_but_takes_nothing_back(name: str, tmp_path: Path) -> None:
    family, fields = RECURRENT[name]
    backbone = load(tmp_path, family, **fields)
    assert not backbone.supports_rollback
    cache = backbone.new_cache(2, 40)
    with torch.no_grad():
        want = backbone.model(TOKENS[:1, :15], use_cache=False).logits[0]
    torch.testing.assert_close(run(backbone, cache, TOKENS[0, :12]), want[:12], rtol=0, atol=1e-4)
    one = run(backbone, cache, TOKENS[0, 12:13], write=Write.SCRATCH)
    torch.testing.assert_close(one, want[12:13], rtol=0, atol=1e-4)
    cache.commit(0, 1)
    with pytest.raises(ConfigError, match="cannot verify drafts; got a pass of 3"):
        run(backbone, cache, TOKENS[0, 13:16], write=Write.SCRATCH)
    with pytest.raises(ConfigError, match="cannot be taken back"):
        cache.truncate(0, 5)
    run(backbone, cache, TOKENS[0, 13:14], write=Write.SCRATCH)
    with pytest.raises(ConfigError, match="cannot be taken back"):
        run(backbone, cache, TOKENS[0, 13:14])
    cache.commit(0, 1)  # the scratch token is still there
    torch.testing.assert_close(run(backbone, cache, TOKENS[0, 14:15]), want[14:], rtol=0, atol=1e-4)
    run(backbone, cache, TOKENS[1, :5], row=1)
    cache.free(0)
    assert cache.lengths == [0, 5]
    torch.testing.assert_close(run(backbone, cache, TOKENS[0, :3]), want[:3], rtol=0, atol=1e-4)


def test_rows_do_not_meet_in_transformers_dynamic_rope(tmp_path: Path) -> None:
    """Its frequencies follow the longest pass that the module has seen."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    backbone = load(tmp_path, "gpt_neox", rope=rope, max_position_embeddings=8)
    cache = backbone.new_cache(2, 40)
    alone = run(backbone, cache, TOKENS[0, :12])
    cache.free(0)
    run(backbone, cache, TOKENS[1], row=1)
    assert torch.equal(run(backbone, cache, TOKENS[0, :12]), alone)
    cache.free(0)
    short = run(backbone, cache, TOKENS[0, :6])
    fresh = HFBackbone.from_path(tmp_path, "cpu", torch.float32)
    assert torch.equal(short, run(fresh, fresh.new_cache(1, 40), TOKENS[0, :6]))
    with pytest.raises(ConfigError, match="cannot verify drafts"):
        run(backbone, cache, TOKENS[0, 6:9], write=Write.SCRATCH)


def test_it_works_with_the_older_name_of_the_cache(gpt2: HFBackbone) -> None:
    """transformers 5.16 to 5.23 take and return `past_key_values`."""
    model = gpt2.model

    class Older(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
            kwargs[gpt2._cache_name] = past_key_values
            return super().forward(input_ids, **kwargs)

    older = Older(model.config)
    older.load_state_dict(model.state_dict())
    backbone = HFBackbone(older)
    assert backbone._cache_name == "past_key_values"
    results = []
    for candidate in (gpt2, backbone):
        cache = candidate.new_cache(1, 40)
        run(candidate, cache, TOKENS[0, :9])
        run(candidate, cache, TOKENS[1, :4], write=Write.SCRATCH)
        results.append(run(candidate, cache, TOKENS[0, 9:12]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_memory_it_states_is_the_memory_it_holds(family: str, tmp_path: Path) -> None:
    backbone = load(tmp_path, family, tie_word_embeddings=True)
    stored = load_file(tmp_path / "model.safetensors")
    assert backbone.weight_nbytes == sum(tensor.nbytes for tensor in stored.values())
    cache = backbone.new_cache(1, 10)
    run(backbone, cache, TOKENS[0, :10])
    layers = cache.open(0, 0).layers
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert backbone.cache_nbytes(1, 10) == held
    assert backbone.cache_nbytes(3, 20) == 6 * held


# ---- refusals


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (bidirectional((6,), 4), "not causal"),
        (tree((6,), (-1, 0, 0, 1)), "not causal"),
        (padded(causal((6,), 4), (2,), left=True), "not causal"),
        (causal((5,), 4), "would see 5 of 6"),
        (AttentionPattern(((6, 6, 6, 6),), causal((6,), 4).local), r"would see \(6, 6, 6, 6\)"),
    ],
    ids=["bidirectional", "tree", "left-padding", "hidden-prefix", "per-token-prefix"],
)
def test_other_patterns_are_refused(
    gpt2: HFBackbone, pattern: AttentionPattern, message: str
) -> None:
    cache = gpt2.new_cache(1, 40)
    run(gpt2, cache, TOKENS[0, :6])
    positions = torch.arange(6, 10)[None]
    with pytest.raises(ConfigError, match=message):
        gpt2.forward(TOKENS[:1, 6:10], positions, pattern, cache, (0,))
    assert cache.lengths == [6]


def test_positions_must_continue_the_row(gpt2: HFBackbone) -> None:
    cache = gpt2.new_cache(1, 40)
    run(gpt2, cache, TOKENS[0, :6])
    with pytest.raises(ConfigError, match=r"positions \[7, 8\].*continue its 6"):
        gpt2.forward(TOKENS[:1, 6:8], torch.tensor([[7, 8]]), causal((6,), 2), cache, (0,))


def test_late_entry_and_trees_need_the_native_backbone(gpt2: HFBackbone) -> None:
    cache = gpt2.new_cache(1, 40)
    positions, pattern = torch.zeros(1, 1, dtype=torch.long), causal((0,), 1)
    with pytest.raises(ConfigError, match="native backbone"):
        gpt2.forward(None, positions, pattern, cache, (0,), entry=Entry(1, torch.zeros(1, 1, 64)))
    run(gpt2, cache, TOKENS[0, :4], write=Write.SCRATCH)
    with pytest.raises(ConfigError, match="native backbone"):
        cache.gather(0, [0, 2])


def test_a_model_without_a_cache_is_refused() -> None:
    class Plain(torch.nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids

    with pytest.raises(ConfigError, match="Plain.forward takes none of cache"):
        HFBackbone(Plain())  # type: ignore[arg-type]


# ---- loading


def test_loading_reads_ids_and_dtype(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "gpt2")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    backbone = HFBackbone.from_path(path, "cpu", torch.bfloat16)
    assert backbone.eos_token_ids == (2, 0)
    assert (backbone.dtype, backbone.vocab_size) == (torch.bfloat16, 259)
    assert run(backbone, backbone.new_cache(1, 8), TOKENS[0, :3]).dtype == torch.bfloat16
    assert not backbone.model.training


def break_nothing_there(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def break_hub_kernel(path: Path) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] = {"attn_implementation": "someone/kernel"}
    file.write_text(json.dumps(config))


def break_truncated(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def break_missing_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def break_wrong_shape(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["transformer.ln_f.weight"] = torch.ones(63)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def break_pickled(path: Path) -> None:
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def break_remote_code(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "code.Model"}}
    config["auto_map"]["AutoConfig"] = "code.Config"
    (path / "config.json").write_text(json.dumps(config))
    (path / "code.py").write_text("raise SystemExit('executed')")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_nothing_there, "has no config.json"),
        (break_truncated, "cannot load"),
        (break_missing_tensor, r"1 tensors are missing, the first is .*h\.1\.mlp\.c_fc"),
        (break_wrong_shape, "cannot load"),
        (break_pickled, "cannot load"),
        (break_remote_code, "cannot load"),
        (break_hub_kernel, "attn_implementation is 'someone/kernel', code from a hub"),
    ],
)
def test_a_damaged_checkpoint_is_refused(damage: Any, message: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "gpt2", tokenizer=False)
    HFBackbone.from_path(path, "cpu", torch.float32)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        HFBackbone.from_path(path, "cpu", torch.float32)
