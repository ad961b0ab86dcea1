"""A verifier of one's own, lenient and therefore not lossless. See docs/add-a-verifier.md."""

import argparse

from hybrid import HybridDecoder
from hybrid.types import Verdict


class LenientVerifier:
    """Accepts a drafted token that is among the target's `width` most probable."""

    name, lossless = "lenient", False

    def __init__(self, width):
        self.width = width

    def verify(self, target_logits, proposal, sampling, streams):
        """Judge each row by itself; the next token is the argmax, whatever `sampling` says."""
        ranked = target_logits.topk(self.width).indices.tolist()  # [B, K+1, width]
        num_accepted, next_token = [], []
        for best, drafted, count in zip(
            ranked, proposal.tokens.tolist(), proposal.num_tokens, strict=True
        ):
            n = 0
            while n < count and drafted[n] in best[n]:
                n += 1
            num_accepted.append(n)
            next_token.append(best[n][0])
        return Verdict(tuple(num_accepted), tuple(next_token))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default", help="as HybridDecoder.from_pretrained")
    model = parser.parse_args().model
    for width in (1, 4):
        decoder = HybridDecoder.from_pretrained(model, verifier=LenientVerifier(width))
        result = decoder.generate("One, two, three, one, two,", max_new_tokens=32)
        print(f"width {width}: acceptance length {result.stats.acceptance_length:.2f}")
