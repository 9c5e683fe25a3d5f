"""The engine: scheduling and bookkeeping of requests. No module of it imports JAX."""
