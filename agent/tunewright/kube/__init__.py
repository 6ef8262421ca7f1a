"""A small client of the Kubernetes API: raw JSON objects, time-outs on every call, watches that notice silence."""
