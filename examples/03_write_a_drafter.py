"""A drafter that proposes what followed each token last time. See docs/add-a-drafter.md."""

import argparse

import torch
from torch.nn.utils.rnn import pad_sequence

from hybrid import HybridDecoder
from hybrid.types import Proposal


class BigramDrafter:
    """Follows the chain: the token that came after the anchor last time, and so on."""

    name, taps, max_draft_tokens = "bigram", (), 8

    def draft(self, state, plan):
        """Propose a chain per row; a row whose anchor is new gets none."""
        drafts = []
        for row in state.rows:
            follows = dict(zip(row.tokens, row.tokens[1:], strict=False))
            own, token = [], row.anchor
            while token in follows and len(own) < plan.num_draft_tokens:
                token = follows[token]
                own.append(token)
            drafts.append(torch.tensor(own, dtype=torch.long))
        return Proposal(pad_sequence(drafts, batch_first=True), tuple(map(len, drafts)))

    observe = reset = lambda *_: None  # it learns nothing, so there is nothing to forget


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default", help="as HybridDecoder.from_pretrained")
    model, prompt = parser.parse_args().model, "1 2 3 4 1 2 3 4 1 2"
    decoder = HybridDecoder.from_pretrained(model, dtype="float32", drafter=BigramDrafter())
    ours = decoder.generate(prompt, max_new_tokens=24)
    ar = decoder.generate(prompt, max_new_tokens=24, strategy="ar")
    print(f"{ours.stats.num_accepted} of {ours.stats.num_drafted} drafted tokens accepted")
    print(f"same tokens as AR: {ours.token_ids == ar.token_ids}")
