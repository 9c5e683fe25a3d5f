"""Serving: prompts in, tokens out, over a static key/value cache."""
