"""One HTTP connection, one request and its answer, and the keys of clients."""
