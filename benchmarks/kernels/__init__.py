"""The attention ops: are they right, how fast are they, and their tuning on the current device."""
