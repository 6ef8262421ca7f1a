"""`serve`: the controller in a cluster."""

import logging
import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tunewright.cli.common import fail, told
from tunewright.clock import SystemClock
from tunewright.domain.state import TuningRecord
from tunewright.exits import Exit
from tunewright.ports import Store

DEFAULT_LISTEN = "0.0.0.0:8080"


def serve(
    namespace: Annotated[
        str,
        typer.Option(envvar="POD_NAMESPACE", help="The controller's own, whose Tunings it serves."),
    ],
    image: Annotated[
        str, typer.Option(envvar="TUNEWRIGHT_IMAGE", help="Image of the load-test pods: this controller's own.")
    ],
    all_namespaces: Annotated[
        bool,
        typer.Option("--all-namespaces", envvar="TUNEWRIGHT_ALL_NAMESPACES", help="Serve the Tunings of all of them."),
    ] = False,
    listen: Annotated[str, typer.Option(help="Where the REST API, probes and /metrics answer.")] = DEFAULT_LISTEN,
    metrics_listen: Annotated[
        str | None, typer.Option(help="A further address for /metrics and /healthz alone, as 0.0.0.0:9090.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A further name that a Host header may carry, as that of an Ingress. May be repeated."),
    ] = None,
    image_pull_policy: Annotated[str, typer.Option(help="For the load-test pods.")] = "IfNotPresent",
    image_pull_secret: Annotated[
        list[str] | None,
        typer.Option(
            envvar="TUNEWRIGHT_IMAGE_PULL_SECRETS",
            help="Name of a Secret that pulls the load-test pods' image, in each Tuning's namespace. May be repeated; "
            "in the environment with blanks between.",
        ),
    ] = None,
    credentials: Annotated[
        Path,
        typer.Option(
            envvar="TUNEWRIGHT_CREDENTIALS",
            help="Folder whose files Tunings may name (apiKeyFile, bearerTokenFile); with --all-namespaces those in "
            "its folder of the Tuning's namespace.",
        ),
    ] = Path("/etc/tunewright/credentials"),
    load_cpu: Annotated[
        str,
        typer.Option(
            envvar="TUNEWRIGHT_LOAD_CPU",
            help="CPU that a load-test pod asks for: with too little its measurements are void.",
        ),
    ] = "1",
) -> None:
    """Run the controller of one namespace, or of all: the loop, the REST API and /metrics, behind a lease.

    It finds the cluster by its ServiceAccount, or by KUBECONFIG.
    """
    from tunewright.api.app import create_app
    from tunewright.api.kubernetes_auth import AccessReviewer, TokenReviewer
    from tunewright.api.server import ApiServer
    from tunewright.cli.tune import stop_on_signals
    from tunewright.cluster import Cluster, ClusterSettings
    from tunewright.telemetry.report import render_report
    from tunewright.telemetry.server import MetricsServer

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    host, port = _address("--listen", listen)
    stop = stop_on_signals()
    with told(), ExitStack() as exits:
        settings = ClusterSettings(
            namespace,
            image,
            image_pull_policy=image_pull_policy,
            image_pull_secrets=tuple(image_pull_secret or ()),
            credentials=credentials,
            load_cpu=load_cpu,
            all_namespaces=all_namespaces,
        )
        cluster = Cluster(settings, SystemClock())

        def report(store: Store, record: TuningRecord) -> str:
            return render_report(record, store.trials(record.name), decisions=store.decisions(record.name))

        app = create_app(
            cluster.api_stores,
            cluster.clock,
            authenticator=TokenReviewer(cluster.reviews),
            authorizer=AccessReviewer(cluster.reviews, namespace, everywhere=all_namespaces),
            allowed_hosts=_hosts(namespace, allowed_host or []),
            ready=cluster.unready,
            metrics=cluster.metrics.exposition,
            public_metrics=True,
            report=report,
        )
        if metrics_listen is not None:
            metrics_host, metrics_port = _address("--metrics-listen", metrics_listen)
            exits.enter_context(MetricsServer(cluster.metrics, metrics_host, metrics_port))
        server = exits.enter_context(ApiServer(app, host=host, port=port))
        what = f"all namespaces, from {namespace}," if all_namespaces else f"namespace {namespace}"
        logging.getLogger("tunewright").info("serving %s at %s as %s", what, server.url, cluster.election.identity)
        kept = cluster.run(stop)
    if not kept:
        fail("another controller holds the lease now: this one ends", Exit.WENT_WRONG)


def _address(option: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        fail(f"{option} {text}: an address with a port is wanted, as {DEFAULT_LISTEN}", Exit.USAGE)
    return host, int(port)


def _hosts(namespace: str, more: list[str]) -> set[str]:
    """The Service's names, the pod's own address (probes and Prometheus use it), and a port-forward's."""
    service = os.environ.get("TUNEWRIGHT_SERVICE", "tunewright")
    names = {
        service,
        f"{service}.{namespace}",
        f"{service}.{namespace}.svc",
        f"{service}.{namespace}.svc.cluster.local",
    }
    pod = os.environ.get("POD_IP", "")
    address = {f"[{pod}]" if ":" in pod else pod} if pod else set()
    return {*names, *address, "localhost", "127.0.0.1", *more}
