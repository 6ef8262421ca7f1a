"""The API's documentation as one page, made from its OpenAPI document.

There is no script in it: what runs on this origin could take the token from whoever types it in and approve with it.
"""

import re
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark }
body { font: 1rem/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
h2 { border-top: 1px solid; margin-top: 2rem; padding-top: .5rem; font-size: 1.1rem }
code { font-family: ui-monospace, monospace; overflow-wrap: anywhere }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #8886; padding: .2rem .5rem; text-align: left; vertical-align: top }
"""


def docs_page(document: dict[str, Any]) -> str:
    """The whole page."""
    info, schemas = document["info"], document["components"]["schemas"]
    operations = [
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    models = [_model(name, schema) for name, schema in schemas.items()]
    title = f"{info['title']} {info['version']}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><p>{escape(info['description'])} The same for programs: "
        '<a href="/openapi.json">openapi.json</a>.</p>'
        '<p>Send the token of the token file with each request: <code>curl -H "Authorization: Bearer $(cat FILE)" '
        "http://…</code></p>" + "".join(operations) + "<h1>Models</h1>" + "".join(models) + "</body></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = [
        (f"{p['in']} <code>{escape(p['name'])}</code>", _type(p["schema"]), p.get("description", ""))
        for p in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {})
    rows += [("body", f"<code>{escape(kind)}</code>: {_type(content['schema'])}", "") for kind, content in body.items()]
    for status, response in operation["responses"].items():
        types = ", ".join(_type(content["schema"]) for content in response.get("content", {}).values() if content)
        rows.append((f"answer {escape(status)}", types, response["description"]))
    token = "" if operation["security"] else " No token is needed."
    return (
        f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}.{token}</p>"
        f"{_table(rows)}"
    )


def _model(name: str, schema: dict[str, Any]) -> str:
    head = f'<h2 id="{escape(name)}"><code>{escape(name)}</code></h2><p>{escape(schema.get("description", ""))}</p>'
    rows = [
        (f"<code>{escape(field)}</code>", _type(facts), facts.get("description", ""))
        for field, facts in schema.get("properties", {}).items()
    ]
    return head + (_table(rows) if rows else f"<p>{_type(schema)}</p>")


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    if "enum" in schema or "const" in schema:
        return ", ".join(f"<code>{escape(str(value))}</code>" for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if schema.get("type") == "array":
        items = schema.get("items")
        return f"list of {_type(items)}" if items else "list"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"map to {_type(schema['additionalProperties'])}"
    pattern = f" <code>{escape(schema['pattern'])}</code>" if "pattern" in schema else ""
    return escape(str(schema.get("type", "any"))) + pattern


def _table(rows: list[tuple[str, str, str]]) -> str:
    """Descriptions may hold `code`; the other two columns are markup already."""
    cells = (
        f"<tr><th scope=row>{first}</th><td>{second}</td><td>{_prose(third)}</td></tr>" for first, second, third in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _prose(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
