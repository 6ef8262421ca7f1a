"""Times as Kubernetes writes them (RFC 3339, UTC), from and to seconds since the epoch."""

from datetime import UTC, datetime


def format_time(at: float) -> str:
    """To the second, as in conditions and Events."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_micro_time(at: float) -> str:
    """To the microsecond, as in Leases."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str) -> float:
    """Either form. Raises `ValueError`."""
    return datetime.fromisoformat(text).timestamp()
