"""The routes and the JSON of their answers."""
