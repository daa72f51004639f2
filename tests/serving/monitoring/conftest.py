"""Bundle of one shape bucket, because most tests start a server."""

from bundle_copies import one_bucket_bundle  # noqa: F401
