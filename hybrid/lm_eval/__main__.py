"""``python -m hybrid.lm_eval`` is the command ``lm-eval``, and knows our model and tasks."""

from __future__ import annotations

import sys
from argparse import Namespace

import hybrid.lm_eval
from hybrid.errors import HybridError


def main() -> None:
    """Run lm-eval's own command line; what it is not told is our model, tasks and device."""
    try:
        _ = hybrid.lm_eval.HybridLM
        from lm_eval._cli import HarnessCLI
        from lm_eval.utils import setup_logging

        setup_logging()
        harness = HarnessCLI()
        arguments = harness.parse_args()
        if not getattr(arguments, "config", None):  # a file says it all, and flags would win
            _fill_in(arguments, include_path=str(hybrid.lm_eval.TASKS), model="hybrid")
            if getattr(arguments, "model", None) == "hybrid":
                _fill_in(arguments, device="auto")  # lm-eval itself would name cuda:0
        harness.execute(arguments)
    except HybridError as error:
        sys.exit(f"Error: {error}")


def _fill_in(arguments: Namespace, **defaults: str) -> None:
    """Set the flags that this subcommand has and that were not given."""
    for name, value in defaults.items():
        if getattr(arguments, name, value) is None:
            setattr(arguments, name, value)


if __name__ == "__main__":
    main()
