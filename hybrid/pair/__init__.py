"""A target and what drafts for it, checked together: what they say, and what is accepted where."""
