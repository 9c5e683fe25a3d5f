"""Other processes: those of the same mesh, and routers that follow the prefix cache."""
