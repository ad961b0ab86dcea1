"""The command ``hybrid``: thin files that call the library. Next: hybrid/cli/main.py."""
