"""The eight lines of a decode step (docs/architecture.md), printed while they happen.

Next: hybrid/decode/step.py.
"""

from __future__ import annotations

import argparse

from hybrid import HybridDecoder, StepRecord


def show(decoder: HybridDecoder, anchor: int, record: StepRecord) -> None:
    def text(*tokens: int) -> str:
        return repr(decoder.tokenizer.decode(tokens)) if decoder.tokenizer else str(tokens)

    (row,) = record.rows
    sources = ", ".join(source.value for source in row.sources)
    print(f"1 plan     mode {record.mode.value}")
    forwards = record.num_draft_forwards
    print(f"2 draft    {row.num_drafted} tokens in {forwards} forwards: {text(*row.drafted)}")
    print(f"3 inputs   anchor {text(anchor)} and the draft: {record.width} tokens, causal")
    print(f"4 forward  {record.width} rows of logits in {1000 * record.forward_seconds:.1f} ms")
    print(f"5 verify   {row.num_accepted} of {row.num_drafted} accepted")
    print(f"6 commit   {text(*row.tokens)} ({sources})")
    print(f"7 cache    {len(row.tokens)} positions kept, {record.width - len(row.tokens)} dropped")
    print(f"8 record   {row.finish_reason or 'go on'}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default", help="as HybridDecoder.from_pretrained")
    decoder = HybridDecoder.from_pretrained(parser.parse_args().model)
    anchor = None
    for event in decoder.stream("A B C A B C A B", max_new_tokens=24):
        if anchor is None:
            print(f"prefill    {event.record.width} prompt tokens, then {event.text!r}\n")
        else:
            show(decoder, anchor, event.record)
        anchor = event.record.rows[0].tokens[-1]
