"""A spec that is wrong: refused by the API server where the schema can say it, else Stalled at once."""

import pytest
from cluster_story import NAMESPACE, phase, status, tuning

from cluster import wait_for
from tunewright.kube.client import Json, Kube
from tunewright.kube.errors import KubeError
from tunewright.kube.resources import TUNINGS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"slo": {"ttftP95": "soon"}}, "ttftP95"),
        ({"objective": {"maximize": "happiness"}}, "maximize"),
        ({"budget": {"trials": 0}}, "trials"),
        ({"load": {"mode": "sometimes"}}, "mode"),
    ],
)
def test_what_the_schema_can_say_is_refused_by_the_api_server(installed: Kube, change: Json, named: str) -> None:
    body = tuning("wrong", "http://prometheus:9090", target="nobody")
    body["spec"] |= change
    with pytest.raises(KubeError, match=named):
        installed.create(TUNINGS, body, NAMESPACE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"load": {"mode": "closedLoop"}}, "concurrency"),
        ({"search": {"include": ["max_seqs"]}}, "max_seqs"),
        ({"target": {"deployment": "nobody"}}, "nobody"),
    ],
)
def test_what_only_the_controller_can_tell_is_stalled_at_once_with_the_field(
    installed: Kube, change: Json, named: str
) -> None:
    kube = installed
    body = tuning("stalled", "http://prometheus:9090", target="nobody")
    body["spec"] |= change
    kube.create(TUNINGS, body, NAMESPACE)
    try:
        wait_for(lambda: named in stalled(kube), f"Stalled names {named}")
    finally:
        kube.delete(TUNINGS, "stalled", NAMESPACE)
        wait_for(lambda: phase(kube, "stalled") == "None", "it is gone")


def stalled(kube: Kube) -> str:
    """What the condition Stalled says while it is true."""
    for condition in status(kube, "stalled").get("conditions") or []:
        if condition["type"] == "Stalled" and condition["status"] == "True":
            return str(condition["message"])
    return ""
