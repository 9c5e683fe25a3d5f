"""The part between connections and the engine: admission, queue, the engine's thread, counts."""
