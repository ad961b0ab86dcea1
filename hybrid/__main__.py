"""``python -m hybrid`` is the command ``hybrid``."""

from __future__ import annotations

from hybrid.cli.main import main

if __name__ == "__main__":
    main()
