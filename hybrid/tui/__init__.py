"""The terminal: pure rendering, the conversation and the chat loop. Next: hybrid/tui/app.py."""
