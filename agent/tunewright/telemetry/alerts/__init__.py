"""Alert rules for Prometheus, and the runbook of each: `python -m tunewright.telemetry.alerts [--check]`."""

from tunewright.telemetry.alerts.rules import ALERTS, Alert

__all__ = ["ALERTS", "Alert"]
