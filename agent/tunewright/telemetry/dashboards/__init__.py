"""Dashboards for Grafana 10 to 13, generated: `python -m tunewright.telemetry.dashboards [--check]`."""

from tunewright.telemetry.dashboards.controller import CONTROLLER_DASHBOARD
from tunewright.telemetry.dashboards.grafana import Dashboard
from tunewright.telemetry.dashboards.promotion import PROMOTION_DASHBOARD
from tunewright.telemetry.dashboards.tuning import TUNING_DASHBOARD
from tunewright.telemetry.dashboards.vllm import VLLM_DASHBOARD

DASHBOARDS: tuple[Dashboard, ...] = (
    TUNING_DASHBOARD,
    PROMOTION_DASHBOARD,
    VLLM_DASHBOARD,
    CONTROLLER_DASHBOARD,
)
