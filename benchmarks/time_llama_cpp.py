"""Time greedy decoding of llama-cpp-python: one JSON request per line in, one JSON answer out.

Run it with an interpreter that has llama-cpp-python and nothing of ours:

    echo '{"prompt": [1, 4093, 198], "max_new_tokens": 32, "eos_token_ids": [2]}' |
        python benchmarks/time_llama_cpp.py model.gguf --threads 2

`hybrid bench --llama-cpp PYTHON` keeps it running and takes turns with it. The name must not be
llama_cpp.py: a script's own folder comes first on the import path.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import llama_cpp


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy llama.cpp, driven through a pipe.")
    parser.add_argument("gguf")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--n-ctx", type=int, default=2048)
    options = parser.parse_args()
    model = llama_cpp.Llama(
        options.gguf,
        n_ctx=options.n_ctx,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        verbose=False,
    )
    print(json.dumps({"version": llama_cpp.__version__, "threads": options.threads}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, **json.loads(line))), flush=True)


def answer(
    model: llama_cpp.Llama,
    prompt: list[int],
    max_new_tokens: int,
    eos_token_ids: list[int],
) -> dict[str, object]:
    started = time.perf_counter()
    model.reset()  # no prompt is read from the cache of the one before
    tokens: list[int] = []
    for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
        tokens.append(token)
        if token in eos_token_ids or len(tokens) == max_new_tokens:
            break
    return {"tokens": tokens, "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    main()
