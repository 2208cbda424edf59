"""Questions to an engine's HTTP server, whose failing to answer is an answer."""

from __future__ import annotations

import aiohttp


async def http_status(client: aiohttp.ClientSession, url: str) -> int | None:
    """Return the status of a GET, None if no connection or no whole answer came about.

    The caller bounds the time.
    """
    try:
        async with client.get(url) as response:
            await response.read()
            return response.status
    except (aiohttp.ClientError, OSError):
        return None
