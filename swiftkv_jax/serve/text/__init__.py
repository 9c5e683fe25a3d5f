"""Conversion between text and token ids: prompts, calls of tools, reasoning, grammars."""
