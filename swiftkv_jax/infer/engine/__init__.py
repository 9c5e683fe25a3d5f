"""The engine: scheduling and bookkeeping of requests, without JAX."""
