"""A model of transformers whose own `generate` drafts and verifies. Next: docs/transformers.md."""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from hybrid.models.store import resolve
from hybrid.plug import attach, detach


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    path = resolve(parser.parse_args().model, "float32")  # a folder that transformers loads, too
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    inputs = tokenizer(["1 2 3 1 2 3 1 2", "red, blue, red,"], padding=True, return_tensors="pt")
    options = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.05}

    want = model.generate(**inputs, **options)  # transformers' own loop
    plug = attach(model, drafter="ngram")
    got = model.generate(**inputs, **options)  # ours, over the same weights
    print(f"same tokens: {got.equal(want)}")
    for row in plug.stats:
        print(f"{row.num_accepted} of {row.num_drafted} drafted tokens accepted")

    first = {name: value[:1] for name, value in inputs.items()}
    model.generate(**first, **options, streamer=TextStreamer(tokenizer))
    detach(model)


if __name__ == "__main__":
    main()
