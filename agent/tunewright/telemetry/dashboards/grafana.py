"""Grafana's dashboard model, as far as it is used here.

The JSON is of schema version 38, Grafana 10.0's: later versions up to 13 take it and bring it up to date themselves.
Only panels that are part of Grafana itself are used, and of each only options that all these versions know.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 38
COLUMNS = 24
DATASOURCE: Mapping[str, str] = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    `style` is a look that the panel gives it: `bound` (red, dashed), `past` (grey, dashed) or `edge` (grey, dotted).

    `empty` says when it has no data although nothing is wrong; it is told under the panel. What is left empty always
    has data in a tuning that went through to the end.
    """

    expr: str
    legend: str = ""
    style: str = ""
    empty: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel: `unit` is one of Grafana's, `steps` are thresholds as (from, colour), `width` is of 24 columns."""

    title: str
    description: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 12
    height: int = 8
    steps: Sequence[tuple[float | None, str]] = ((None, "green"),)
    no_value: str = "No data"
    minimum: float | None = None
    maximum: float | None = None
    mappings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    transformations: Sequence[Json] = ()
    overrides: Sequence[Json] = ()
    links: Sequence[tuple[str, str]] = ()

    @property
    def told(self) -> str:
        """The description, with when the panel is empty."""
        reasons = dict.fromkeys(query.empty for query in self.queries if query.empty)
        return " ".join([self.description, *(f"Empty {reason}." for reason in reasons)])


@dataclass(frozen=True)
class Row:
    """A heading, with the panels below it."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Variable:
    """A choice above the dashboard: `query` is Grafana's `label_values(...)`; without it, it is typed in."""

    name: str
    label: str
    query: str = ""
    default: str = ""
    everything: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Annotation:
    """Marks on all panels over time, from a query: where its value is above 0."""

    name: str
    expr: str
    title: str
    text: str
    colour: str


@dataclass(frozen=True)
class Dashboard:
    """One dashboard; `uid` is what other dashboards link to."""

    uid: str
    title: str
    description: str
    variables: Sequence[Variable]
    rows: Sequence[Row]
    annotations: Sequence[Annotation] = ()
    since: str = "now-6h"
    refresh: str = "30s"

    @property
    def panels(self) -> list[Panel]:
        """All panels, top to bottom."""
        return [panel for row in self.rows for panel in row.panels]


def dashboard_json(dashboard: Dashboard) -> Json:
    """What Grafana imports."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["tunewright"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": dashboard.refresh,
        "time": {"from": dashboard.since, "to": "now"},
        "timepicker": {},
        "fiscalYearStartMonth": 0,
        "liveNow": False,
        "weekStart": "",
        "links": [
            {
                "type": "dashboards",
                "title": "Tunewright",
                "tags": ["tunewright"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
                "url": "",
            }
        ],
        "annotations": {"list": [_built_in(), *(_annotation(each) for each in dashboard.annotations)]},
        "templating": {"list": [_datasource(), *(_variable(each) for each in dashboard.variables)]},
        "panels": list(_layout(dashboard.rows)),
    }


def _layout(rows: Iterable[Row]) -> Iterable[Json]:
    number, top = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
        }
        top, left, tallest = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, tallest = top + tallest, 0, 0
            number += 1
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest


def _panel(panel: Panel) -> Json:
    defaults: Json = {
        "unit": panel.unit,
        "noValue": panel.no_value,
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
        "thresholds": {
            "mode": "absolute",
            "steps": [{"color": colour, "value": value} for value, colour in panel.steps],
        },
        "mappings": _mappings(panel.mappings),
        "custom": _custom(panel.kind),
    }
    for name, bound in (("min", panel.minimum), ("max", panel.maximum)):
        if bound is not None:
            defaults[name] = bound
    table = panel.kind == "table"
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.told,
        "datasource": dict(DATASOURCE),
        "fieldConfig": {"defaults": defaults, "overrides": [*_styles(panel.queries), *panel.overrides]},
        "options": {**_OPTIONS[panel.kind], **panel.options},
        "transformations": list(panel.transformations),
        "links": [{"title": title, "url": url, "targetBlank": True} for title, url in panel.links],
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": dict(DATASOURCE),
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "editorMode": "code",
                "format": "table" if table else "time_series",
                "instant": panel.kind in _INSTANT,
                "range": panel.kind not in _INSTANT,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


_INSTANT = {"table", "stat", "bargauge"}
_LEGEND: Json = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
_LAST: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: Mapping[str, Json] = {
    "timeseries": {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
    "state-timeline": {
        "mergeValues": True,
        "showValue": "never",
        "alignValue": "left",
        "rowHeight": 0.85,
        "legend": {**_LEGEND, "showLegend": False},
        "tooltip": {"mode": "single", "sort": "none"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "auto",
        "reduceOptions": _LAST,
    },
    "bargauge": {
        "displayMode": "basic",
        "orientation": "horizontal",
        "showUnfilled": True,
        "minVizWidth": 0,
        "minVizHeight": 10,
        "valueMode": "color",
        "reduceOptions": _LAST,
    },
    "table": {"showHeader": True, "cellHeight": "sm", "footer": {"show": False, "reducer": ["sum"], "fields": ""}},
}


def _custom(kind: str) -> Json:
    match kind:
        case "timeseries":
            return {
                "drawStyle": "line",
                "lineInterpolation": "linear",
                "lineWidth": 2,
                "fillOpacity": 0,
                "pointSize": 4,
                "showPoints": "never",
                "spanNulls": False,
                "axisPlacement": "auto",
                "axisLabel": "",
                "scaleDistribution": {"type": "linear"},
                "stacking": {"mode": "none", "group": "A"},
                "thresholdsStyle": {"mode": "off"},
                "hideFrom": {"legend": False, "tooltip": False, "viz": False},
            }
        case "state-timeline":
            return {"lineWidth": 0, "fillOpacity": 80, "hideFrom": {"legend": False, "tooltip": False, "viz": False}}
        case "table":
            return {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False}
        case _:
            return {}


def _styles(queries: Sequence[Query]) -> list[Json]:
    looks = {"bound": ("red", [8, 6]), "past": ("text", [8, 6]), "edge": ("text", [2, 6])}
    return [
        {
            "matcher": {"id": "byFrameRefID", "options": chr(ord("A") + index)},
            "properties": [
                {"id": "color", "value": {"mode": "fixed", "fixedColor": looks[query.style][0]}},
                {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": looks[query.style][1]}},
                {"id": "custom.lineWidth", "value": 1},
            ],
        }
        for index, query in enumerate(queries)
        if query.style
    ]


def _mappings(mappings: Mapping[str, tuple[str, str]]) -> list[Json]:
    if not mappings:
        return []
    choices = {
        value: {"text": text, "color": colour, "index": index}
        for index, (value, (text, colour)) in enumerate(mappings.items())
    }
    return [{"type": "value", "options": choices}]


def _datasource() -> Json:
    return {
        "type": "datasource",
        "name": "datasource",
        "label": "Prometheus",
        "description": "The Prometheus (or what speaks its API) that scrapes Tunewright and vLLM.",
        "query": "prometheus",
        "regex": "",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "skipUrlSync": False,
    }


def _variable(variable: Variable) -> Json:
    common = {
        "name": variable.name,
        "label": variable.label,
        "description": variable.hint,
        "hide": 0,
        "skipUrlSync": False,
    }
    if not variable.query:
        choice = {"text": variable.default, "value": variable.default, "selected": True}
        return {**common, "type": "textbox", "query": variable.default, "current": choice, "options": [choice]}
    every = bool(variable.everything)
    return {
        **common,
        "type": "query",
        "datasource": dict(DATASOURCE),
        "definition": variable.query,
        "query": {"query": variable.query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "regex": "",
        "current": {"text": ["All"], "value": ["$__all"], "selected": True} if every else {},
        "includeAll": every,
        "allValue": variable.everything or None,
        "multi": every,
        "options": [],
        "refresh": 2,
        "sort": 1,
    }


def _built_in() -> Json:
    return {
        "builtIn": 1,
        "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        "enable": True,
        "hide": True,
        "iconColor": "rgba(0, 211, 255, 1)",
        "name": "Annotations & Alerts",
        "type": "dashboard",
    }


def _annotation(annotation: Annotation) -> Json:
    return {
        "name": annotation.name,
        "datasource": dict(DATASOURCE),
        "enable": True,
        "hide": False,
        "iconColor": annotation.colour,
        "expr": annotation.expr,
        "target": {"expr": annotation.expr, "refId": "Anno", "interval": ""},
        "titleFormat": annotation.title,
        "textFormat": annotation.text,
        "tagKeys": "",
        "useValueForTime": False,
    }
