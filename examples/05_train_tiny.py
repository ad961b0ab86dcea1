"""A random tiny model answers prompts and learns to draft its answers. See docs/training.md."""

import argparse
import tempfile
from pathlib import Path

from hybrid import HybridDecoder
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training.generate import GenerateConfig, generate
from hybrid.training.loop import train
from hybrid.training.prompts import read_prompts
from hybrid.training.recipes import build
from hybrid.training.self_diffusion.config import SelfDiffusionConfig

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: a random one, made now")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hybrid-"))
    model = args.model or str(tiny_checkpoint(folder / "model", num_layers=4, scale=0.3, seed=1))
    target = HybridDecoder.from_pretrained(model, dtype="bfloat16")

    asked = "\n".join(f"How far is {a} from {b}?" for a in range(10) for b in range(10))
    answers = GenerateConfig(output=folder / "answers.jsonl", model=model, max_new_tokens=64)
    generate(read_prompts(asked.encode(), "prompts.txt"), answers, lambda: target)

    config = SelfDiffusionConfig(
        data=answers.output, output=folder / "run", model=model, num_draft_tokens=4,
        rank=8, sampler_size=64, steps=args.steps, num_eval_sequences=8, keep_contexts=True,
    )  # fmt: skip
    recipe = build("self-diffusion", config)
    adapter = train(recipe, lambda row: print(f"{row['step']}: {row['loss']}"))
    trained = HybridDecoder.from_pretrained(model, dtype="bfloat16", adapter=adapter)
    question = [{"role": "user", "content": "How far is 12 from 34?"}]  # not among the prompts
    result = trained.generate(question, max_new_tokens=64)
    print(f"acceptance length {result.stats.acceptance_length:.2f}, adapter in {adapter}")
