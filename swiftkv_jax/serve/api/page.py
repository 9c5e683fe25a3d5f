"""GET /: a page to talk to the model. One file without resources from elsewhere; it asks the
routes of the API, with a key that its reader types."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from ..app import App
from ..http.exchange import HTTPExchange


async def page(app: App, exchange: HTTPExchange) -> None:
    """GET /"""
    content, policy = _page()
    exchange.extra |= {
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "x-frame-options": "DENY",
    }
    await exchange.send_bytes(200, content, "text/html; charset=utf-8")


@functools.cache
def _page() -> tuple[bytes, str]:
    """(the page, a policy under which nothing but its own script and style runs)."""
    text = resources.files(__package__).joinpath("page.html").read_text("utf-8")
    allowed = {
        name: base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        for name in ("script", "style")
        if (found := re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL))
    }
    policy = "; ".join(
        [
            "default-src 'none'",
            "connect-src 'self'",
            *(f"{name}-src 'sha256-{digest}'" for name, digest in allowed.items()),
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    return text.encode(), policy
