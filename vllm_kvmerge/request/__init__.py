"""The request field ``kv_compression``: its spec, schema, catalogue, and limits on its cost."""
