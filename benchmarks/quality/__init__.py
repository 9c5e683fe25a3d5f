"""How good students of the demo teacher are, beside the teacher: see `__main__`."""
