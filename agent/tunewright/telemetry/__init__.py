"""What people and monitoring see of a tuning: exported metrics, the terminal, the report, generated documentation."""
