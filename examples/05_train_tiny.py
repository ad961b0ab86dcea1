"""Train a diffusion adapter on a random tiny model's own answers. See docs/training.md."""

import argparse
import json
import tempfile
from pathlib import Path

from hybrid import HybridDecoder
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training.loop import train
from hybrid.training.recipes import build
from hybrid.training.self_diffusion.config import SelfDiffusionConfig

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: a random one, made now")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hybrid-"))
    model = args.model or str(tiny_checkpoint(folder / "model"))
    decoder = HybridDecoder.from_pretrained(model, dtype="bfloat16")

    prompts = [f"{a} and {b}" for a in range(6) for b in range(6)]
    answers = decoder.generate(prompts, strategy="ar", max_new_tokens=32)
    with (folder / "data.jsonl").open("w") as data:
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = decoder.tokenizer.encode(prompt)
            data.write(json.dumps({"p": ids, "r": answer.token_ids}) + "\n")

    entry = 2 * decoder.backbone.num_layers // 3  # the draft pass runs the last third
    config = SelfDiffusionConfig(
        data=folder / "data.jsonl", output=folder / "run", model=model, num_draft_tokens=4,
        entry_layer=entry, feature_layers=(0,), rank=8, steps=args.steps, warmup_steps=5,
        learning_rate=1e-2, num_eval_sequences=4, eval_every=50, keep_contexts=True,
    )  # fmt: skip
    recipe = build("self-diffusion", config)
    adapter = train(recipe, lambda row: print(f"{row['step']}: {row['loss']}"))
    trained = HybridDecoder.from_pretrained(model, dtype="bfloat16", adapter=adapter)
    result = trained.generate("2 and 3", max_new_tokens=32)
    print(f"acceptance length {result.stats.acceptance_length:.2f}, adapter in {adapter}")
