"""Files, JSON lines, provenance of measurements and plots."""
