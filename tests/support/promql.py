"""What the tests ask of PromQL: names in it, Grafana's variables filled in, counters not under a rate."""

import re

NAME = re.compile(r"\b(?:vllm:|tunewright_|process_)\w+")
_COUNTER = re.compile(r"\b(?:vllm:|tunewright_|process_)\w+?(?:_total|_bucket|_sum|_count)\b")
_RATED = re.compile(r"\b(?:rate|increase|irate)\(\s*$")


def filled(expr: str, variables: dict[str, str]) -> str:
    """The query as Grafana would send it."""
    for name, value in variables.items():
        expr = expr.replace(f"${{{name}}}", value).replace(f"${name}", value)
    assert "$" not in expr, expr
    return expr


def names(expr: str) -> set[str]:
    """Metric names in a query: the text in quotes is labels' values."""
    return set(NAME.findall(re.sub(r'"[^"]*"', '""', expr)))


def counters_without_rate(expr: str) -> list[str]:
    """Counters (and parts of histograms) that are not the argument of a rate."""
    return [found[0] for found in _COUNTER.finditer(expr) if not _RATED.search(expr[: found.start()])]
