from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training import masks
from hybrid.training.trainable import LoraOptions, Trainable, load_trainable

LORA = LoraOptions(rank=4, alpha=8.0, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("trainable"), num_layers=2, vocab_size=40)


def _ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, 200, (batch, length), generator=torch.Generator().manual_seed(1))


def _causal_logits(trainable: Trainable, ids: Tensor) -> Tensor:
    length = ids.shape[1]
    return trainable(ids, torch.arange(length), masks.causal(length))


def _train_a_little(trainable: Trainable) -> None:
    loss = _causal_logits(trainable, _ids()).square().mean()
    loss.backward()
    with torch.no_grad():
        for weight in trainable.parameters():
            if weight.grad is not None:
                weight -= 0.05 * weight.grad / weight.grad.norm().clamp(min=1e-9)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_permuted_sequence_gives_the_same_logits(tmp_path: Path, family: str) -> None:
    trainable = load_trainable(tiny_checkpoint(tmp_path, family, num_layers=2))
    ids = _ids()
    plain = trainable.model(input_ids=ids).logits
    order = torch.randperm(9, generator=torch.Generator().manual_seed(2))
    mask = masks.causal(9)[order][:, order]
    with torch.no_grad():
        permuted = trainable(ids[:, order], order, mask)
        assert torch.allclose(permuted, plain[:, order], atol=1e-4)
        unmasked = trainable(ids, torch.arange(9), masks.full(9))
    assert not torch.allclose(unmasked, plain, atol=0.1)


@torch.no_grad()
def test_rows_can_have_masks_of_their_own(model: Path) -> None:
    trainable = load_trainable(model)
    ids, real = _ids(), torch.ones(2, 9, dtype=torch.bool)
    real[1, 6:] = False
    padded = trainable(ids, torch.arange(9), masks.hide_padding(masks.full(9), real))
    alone = trainable(ids[1:, :6], torch.arange(6), masks.full(6))
    assert torch.allclose(padded[1:, :6], alone, atol=1e-5)
    assert torch.isfinite(padded).all()


@torch.no_grad()
def test_only_wanted_logits_are_computed(model: Path) -> None:
    trainable, keep = load_trainable(model), torch.tensor([7, 2])
    every = _causal_logits(trainable, _ids())
    some = trainable(_ids(), torch.arange(9), masks.causal(9), keep)
    assert torch.allclose(some, every[:, keep], atol=1e-6)
    trainable._takes_logits_to_keep = False  # as older model classes
    assert torch.equal(trainable(_ids(), torch.arange(9), masks.causal(9), keep), every[:, keep])


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_the_teacher_is_the_model_before_training(model: Path, lora: LoraOptions | None) -> None:
    trainable = load_trainable(model, lora=lora, keep_teacher=True)
    before = _causal_logits(trainable, _ids()).detach()
    _train_a_little(trainable)
    teacher = trainable.teacher(_ids(), torch.arange(9), masks.causal(9))
    assert torch.equal(teacher, before)
    assert not teacher.requires_grad
    after = _causal_logits(trainable, _ids())
    assert after.requires_grad
    assert not torch.allclose(after, before, atol=1e-3)


def test_the_teacher_is_no_parameter(model: Path) -> None:
    plain, kept = load_trainable(model), load_trainable(model, keep_teacher=True)
    assert kept.state_dict().keys() == plain.state_dict().keys()
    with pytest.raises(ConfigError, match="keep_teacher=True"):
        plain.teacher(_ids(), torch.arange(9), masks.causal(9))


def test_lora_trains_the_updates_alone_and_starts_alike(model: Path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = (load_trainable(model, lora=LORA) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    trained = {n for n, p in first.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2  # A and B of seven projections in two layers
    assert all("lora_" in name for name in trained)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name]), name
    narrow = load_trainable(model, lora=LoraOptions(2, 2.0, ("q_proj", "o_proj")))
    assert sum(p.requires_grad for p in narrow.parameters()) == 2 * 2 * 2


def test_dropout_stays_off(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, num_layers=1, attention_dropout=0.9)
    trainable = torch.nn.Sequential(load_trainable(path)).train()[0]
    assert trainable.training
    with torch.no_grad():
        assert torch.equal(*(_causal_logits(trainable, _ids()) for _ in range(2)))


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_a_saved_checkpoint_is_the_trained_model(
    model: Path, tmp_path: Path, lora: LoraOptions | None
) -> None:
    trainable = load_trainable(model, lora=lora)
    _train_a_little(trainable)
    weights = {name: value.clone() for name, value in trainable.state_dict().items()}
    folder, fields = tmp_path / "saved", {"mask_token_id": 7, "block_size": 4}
    trainable.save(folder, fields, dtype=torch.float32, card="# Card\n")
    for name, value in trainable.state_dict().items():
        assert torch.equal(value, weights[name]), name
    config = json.loads((folder / "config.json").read_text())
    assert {**config, **fields, "dtype": "float32"} == config
    assert "mask_token_id" not in trainable.model.config.to_dict()
    assert (folder / "README.md").read_text() == "# Card\n"
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    for file in folder.iterdir():
        assert str(model).encode() not in file.read_bytes(), file
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = _causal_logits(trainable, _ids())
        assert torch.allclose(loaded(input_ids=_ids()).logits, expected, atol=1e-4)
    trainable.save(folder)  # over the first one
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_merged_weights_are_rounded_once(model: Path, tmp_path: Path) -> None:
    trainable = load_trainable(model, lora=LORA)
    _train_a_little(trainable)
    trainable.save(tmp_path / "saved")
    saved, start = (load_file(f / "model.safetensors") for f in (tmp_path / "saved", model))
    values, merged = trainable.state_dict(), 0
    for name, value in saved.items():
        prefix = f"model.base_model.model.{name.removesuffix('.weight')}"
        expected = start[name]
        if f"{prefix}.lora_A.default.weight" in values:
            a, b = (values[f"{prefix}.lora_{x}.default.weight"] for x in "AB")
            expected, merged = expected + b @ a * (LORA.alpha / LORA.rank), merged + 1
        assert torch.equal(value, expected.bfloat16()), name
    assert merged == 2 * 7
    assert saved.keys() == start.keys()


@pytest.mark.parametrize(
    ("lora", "merge"), [(None, True), (LORA, True), (LORA, False)], ids=["full", "lora", "adapter"]
)
def test_saving_copies_no_weight_as_it_is_and_drops_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: LoraOptions | None, merge: bool
) -> None:
    path = tiny_checkpoint(tmp_path / "model", num_layers=1, tie_word_embeddings=True)
    trainable = load_trainable(path, lora=lora)
    _train_a_little(trainable)
    weights = {name: value.clone() for name, value in trainable.state_dict().items()}

    def copied(self: torch.nn.Parameter, memo: object) -> None:
        pytest.fail("a weight was copied on its device")

    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", copied)
    trainable.save(tmp_path / "saved", merge=merge)
    assert all(weight.grad is None for weight in trainable.parameters())
    for name, value in trainable.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert [p.requires_grad for p in trainable.parameters()].count(True) > 0
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    saved = load_file(file)
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    if merge:
        assert saved.keys() == load_file(path / "model.safetensors").keys(), "tied once only"


def test_settings_that_transformers_would_not_write_are_kept(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", num_layers=1)
    settings = '{"eos_token_id": [1, 2], "do_sample": false, "temperature": 0.6, "top_k": -5}'
    (path / "generation_config.json").write_text(settings)
    trainable = load_trainable(path)
    assert trainable.eos_token_ids == (1, 2)
    trainable.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "generation_config.json").read_text() == settings


def test_a_saved_adapter_loads_in_peft(model: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    trainable = load_trainable(model, lora=LORA)
    _train_a_little(trainable)
    trainable.save(tmp_path / "adapter", dtype=torch.float32, merge=False, card="# Card\n")
    for file in (tmp_path / "adapter").iterdir():
        assert str(model).encode() not in file.read_bytes(), file
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model), tmp_path / "adapter"
    )
    with torch.no_grad():
        expected = _causal_logits(trainable, _ids())
        assert torch.allclose(loaded(input_ids=_ids()).logits, expected, atol=1e-5)


def test_a_full_disk_leaves_the_former_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainable = load_trainable(model)
    trainable.save(tmp_path / "saved")
    before = {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()}

    def fails(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hybrid.training.trainable.shutil.copyfile", fails)
    _train_a_little(trainable)
    with pytest.raises(CheckpointError, match="No space left on device.*is intact"):
        trainable.save(tmp_path / "saved")
    assert {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_a_failed_last_rename_leaves_the_former_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainable, rename = load_trainable(model), Path.rename
    trainable.save(tmp_path / "saved")
    before = {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()}

    def fails(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    _train_a_little(trainable)
    for folder in ("saved", "other"):
        with pytest.raises(CheckpointError, match="Input/output error.*is intact"):
            trainable.save(tmp_path / folder)
    assert {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def _packed(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "q4-1", "bits": 4}
    (path / "config.json").write_text(json.dumps(config))


def _foreign(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["attn_implementation"] = "someone/code"
    (path / "config.json").write_text(json.dumps(config))


def _incomplete(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (_packed, ConfigError, "packed weights, expected dense"),
        (_foreign, CheckpointError, "code from a hub"),
        (_incomplete, CheckpointError, "1 tensors are missing.*model.norm.weight"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], kind: type[Exception], message: str
) -> None:
    path = tiny_checkpoint(tmp_path, num_layers=1, tokenizer=False)
    damage(path)
    with pytest.raises(kind, match=message):
        load_trainable(path)


def test_recurrent_models_are_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "mamba", num_layers=1, tokenizer=False)
    with pytest.raises(CheckpointError, match="transformers cannot load"):
        load_trainable(path)


def _rounded_apart(logits: Tensor) -> Tensor:
    """The rows of a batch, as kernels may compute them."""
    rows = torch.arange(len(logits))[:, None, None]
    return logits + 1e-4 * rows


@pytest.mark.parametrize("mask", [masks.causal, masks.full])
@pytest.mark.parametrize("noise", [lambda logits: logits, _rounded_apart], ids=["exact", "rounded"])
def test_a_model_that_ignores_masks_is_refused(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    mask: Callable[[int], Tensor],
    noise: Callable[[Tensor], Tensor],
) -> None:
    run = Trainable._run

    def deaf(self: Trainable, inner: object, ids: Tensor, *rest: object) -> Tensor:
        length = ids.shape[1]
        return noise(run(self, inner, ids, torch.arange(length), mask(length), None))

    monkeypatch.setattr(Trainable, "_run", deaf)
    with pytest.raises(ConfigError, match="LlamaForCausalLM does not follow"):
        load_trainable(model)


def test_a_model_whose_rows_are_rounded_apart_is_not_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Trainable._run
    monkeypatch.setattr(Trainable, "_run", lambda *args: _rounded_apart(run(*args)))
    load_trainable(model)


def test_unknown_targets_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"targets: got \['w'\].*down_proj, .*q_proj"):
        load_trainable(model, lora=LoraOptions(2, 2.0, ("w",)))


def test_a_sliding_window_limits_the_length(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "a", "mistral", num_layers=1, sliding_window=16)
    assert load_trainable(path).max_length == 16
    path = tiny_checkpoint(tmp_path / "b", "qwen2", num_layers=1, sliding_window=16)
    assert load_trainable(path).max_length == 512  # no layer of it slides


@pytest.mark.default_model
def test_the_default_model_can_be_trained() -> None:
    trainable = load_trainable("default", lora=LoraOptions(1, 1.0, ("q_proj",)))
    assert trainable.tokenizer is not None
    ids = torch.tensor([trainable.tokenizer.encode("The capital of France is")])
    with torch.no_grad():
        token = int(_causal_logits(trainable, ids)[0, -1].argmax())
    assert trainable.tokenizer.decode([token]) == " Paris"
