"""The OpenAI-compatible server; `command` has its flags."""
