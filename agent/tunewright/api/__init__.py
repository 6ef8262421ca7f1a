"""The REST API: tunings to read, decisions to take."""
