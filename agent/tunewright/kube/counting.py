"""What each request asks of the API server, in the words of RBAC: for counting them."""

from collections.abc import Callable, Mapping

Observer = Callable[[str, str, int | None], None]
"""Is told of each request that was sent: verb, resource (`tunings/status`), and HTTP status; None: no answer came."""

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


def asked(method: str, path: str, query: Mapping[str, str]) -> tuple[str, str]:
    """Verb and resource, as a Role names them; the resource is `other` for what is no object, as `/version`."""
    parts = path.strip("/").split("/")
    at = {"api": 2, "apis": 3}.get(parts[0], len(parts))
    if parts[at : at + 1] == ["namespaces"] and len(parts) > at + 2:
        at += 2
    plural, name, subresource = (*parts[at : at + 3], "", "", "")[:3]
    if not plural:
        return method.lower(), "other"
    resource = f"{plural}/{subresource}" if subresource else plural
    if method == "GET":
        return "watch" if query.get("watch") else "get" if name else "list", resource
    if method == "DELETE":
        return "delete" if name else "deletecollection", resource
    return _VERBS.get(method, method.lower()), resource
