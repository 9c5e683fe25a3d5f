"""Between connections and the engine: admission, the queue, the thread of the engine, counts."""
