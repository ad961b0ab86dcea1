"""Decode in vLLM, in the Python that has it: `python vllm_driver.py REQUEST RESULT`.

It runs where this project is not installed and imports nothing of it. The request is JSON: `engine`
(arguments of `vllm.LLM`), `prompts` (lists of token ids) and `max_new_tokens`. The result is JSON:
`version`, and `steps`: for each prompt the tokens of each pass of the target, the prefill first.
Greedy, one prompt after the other, end tokens ignored.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(request: Path, result: Path) -> None:
    """Read the request, decode, write the result."""
    import vllm

    asked = json.loads(request.read_text(encoding="utf-8"))
    llm = vllm.LLM(skip_tokenizer_init=True, enforce_eager=True, **asked["engine"])
    params = vllm.SamplingParams(
        temperature=0, max_tokens=asked["max_new_tokens"], detokenize=False, ignore_eos=True
    )
    steps = [decode(llm.llm_engine, f"{i}", p, params) for i, p in enumerate(asked["prompts"])]
    text = json.dumps({"version": vllm.__version__, "steps": steps})
    result.write_text(text, encoding="utf-8")


def decode(engine: Any, name: str, prompt: list[int], params: Any) -> list[list[int]]:
    """Return the tokens of each pass; what a step adds to the output is what its pass committed."""
    engine.add_request(name, {"prompt_token_ids": prompt}, params)
    steps: list[list[int]] = []
    known = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            if len(tokens) > known:
                steps.append(tokens[known:])
                known = len(tokens)
    return steps


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
