"""From the body of a request to what the engine runs."""
