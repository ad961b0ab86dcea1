"""One prompt, then several at once, and what the numbers say. Next: 02_stream_steps.py."""

from __future__ import annotations

import argparse

from hybrid import HybridDecoder, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default", help="as HybridDecoder.from_pretrained")
    decoder = HybridDecoder.from_pretrained(parser.parse_args().model)

    # A string is a raw prompt; a list of messages goes through the chat template.
    question = [{"role": "user", "content": "Why is the sky blue?"}]
    result = decoder.generate(question, SamplingParams(temperature=0, max_new_tokens=32))
    stats = result.stats
    print(result.text)
    print(f"{stats.num_new_tokens} tokens, finished by {result.finish_reason}")
    print(f"acceptance length {stats.acceptance_length:.2f}")
    print(f"tokens per forward {stats.tokens_per_forward:.2f}")

    # A list of prompts is one batch; fields of SamplingParams are keywords too.
    batch = decoder.generate(
        ["Once upon a time", "The capital of France is"], temperature=0.8, seed=1, max_new_tokens=16
    )
    for row in batch:
        print(repr(row.text))


if __name__ == "__main__":
    main()
