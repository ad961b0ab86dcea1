"""lm-eval on one decoder under two strategies. Next: docs/lm-eval.md."""

from __future__ import annotations

import argparse

import lm_eval
from lm_eval.tasks import TaskManager

from hybrid import HybridDecoder
from hybrid.lm_eval import TASKS, HybridLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default", help="as HybridDecoder.from_pretrained")
    parser.add_argument("--limit", type=int, default=4, help="questions of each task")
    arguments = parser.parse_args()
    decoder = HybridDecoder.from_pretrained(arguments.model)
    manager = TaskManager(include_path=TASKS, include_defaults=False)
    for strategy in "ar", "speculative":
        report = lm_eval.simple_evaluate(
            HybridLM(decoder, strategy=strategy),
            tasks=["hybrid_arithmetic", "hybrid_extraction"],
            task_manager=manager,
            limit=arguments.limit,
            apply_chat_template=True,
        )
        results, config = report["results"], report["config"]
        print(f"strategy {strategy}")
        print(f"arithmetic {results['hybrid_arithmetic']['exact_match,none']:.3f}")
        print(f"extraction {results['hybrid_extraction']['acc,none']:.3f}")
        print(f"tokens per forward {config['hybrid_tokens_per_forward']:.2f}")


if __name__ == "__main__":
    main()
