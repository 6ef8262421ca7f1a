"""Where the records are kept: SQLite on one machine, memory in tests."""
