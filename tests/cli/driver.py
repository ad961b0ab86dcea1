"""Run the command line on a scripted decoder: ``driver.py SCENARIO ARGS``."""

from __future__ import annotations

import signal
import sys

from fake_decoder import DenoisingDecoder, FakeDecoder

from hybrid.cli import main, options
from hybrid.errors import ProposalError
from hybrid.types import Source

LONG = [((f"word{i} ", Source.DRAFT_VERIFIED), ("and ", Source.BONUS)) for i in range(200)]
EVIL = [
    (("\x1b", Source.AR),),
    (("[31mred\x07 \x9b2J [bold]markup[/bold] &#27;[2J &#155;", Source.DRAFT_VERIFIED),),
    (("\r\x1b]0;title\x07done", Source.BONUS),),
]
SCENARIOS = {
    "hello": lambda: FakeDecoder(delay=0.02),
    "long": lambda: FakeDecoder(LONG, delay=0.1),
    "stuck": lambda: FakeDecoder(LONG, delay=60),
    "evil": lambda: FakeDecoder(EVIL),
    "small": lambda: FakeDecoder(max_seq_len=12),
    "denoises": lambda: DenoisingDecoder(delay=0.3),
    "breaks": lambda: FakeDecoder(error={2: ProposalError("The drafter broke.")}),
}

if __name__ == "__main__":
    # A test run in the background of a shell inherits an ignored Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    decoder = SCENARIOS[sys.argv.pop(1)]()
    options.load_decoder = lambda _: decoder
    main.main()
