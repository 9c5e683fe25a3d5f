"""Conversion of request bodies into requests of the engine."""
