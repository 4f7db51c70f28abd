# ruff: noqa: INP001  # a program, copied into the image
"""Exits with 0 when the server of this container answers. It is alive while it loads its models, too."""

import os
import ssl
import urllib.request

# Its own certificate is for its outside name, and this question never leaves the container.
unchecked = ssl._create_unverified_context()  # noqa: S323, SLF001
scheme = "https" if os.environ.get("HEARTH_TLS_CERT") else "http"
url = f"{scheme}://127.0.0.1:{os.environ.get('HEARTH_PORT', '8000')}/health/live"
urllib.request.urlopen(url, timeout=4, context=unchecked).close()  # noqa: S310  # one of two schemes
