"""Export a DFlash drafter for vLLM, and see whether it is sound. Next: docs/serving.md."""

import argparse
import tempfile
from pathlib import Path

from hybrid.export.export import export
from hybrid.pair.diagnosis import Measuring, diagnose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--drafter", type=Path, default=Path("run/dflash"))
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    output = Path(tempfile.mkdtemp(prefix="hybrid-")) / "drafter"
    done = export("vllm", args.drafter, output, target=args.model)
    print(done.command)

    found = diagnose(args.model, output, Measuring(max_new_tokens=args.max_new_tokens))
    for finding in found.findings:
        print(f"{finding.level.value}: {finding.check}: {finding.text}")
    for trace in found.traces:
        print(f"{trace.engine}: {trace.acceptance_length:.2f} tokens per pass")


if __name__ == "__main__":
    main()
