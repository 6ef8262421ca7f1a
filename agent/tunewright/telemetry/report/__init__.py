"""The report of a tuning: one self-contained page for who approves it, and for who asks a year later why."""

from tunewright.telemetry.report.data import report_data
from tunewright.telemetry.report.page import render_report

__all__ = ["render_report", "report_data"]
