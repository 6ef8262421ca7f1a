"""From the metrics of production to its traffic profile, and how far two profiles are apart."""
