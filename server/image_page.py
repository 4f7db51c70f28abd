"""What a person sees in a browser who opens a link to an image that is not there any more. Programs get JSON."""

from __future__ import annotations

from starlette.responses import HTMLResponse

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>This image is not here any more</title>
<style>body {{ font: 1rem/1.5 sans-serif; max-width: 34rem; margin: 15vh auto; padding: 0 1rem }}</style>
<h1>This image is not here any more</h1>
<p>Links to images work for {hours:g} hours after an image was made; then it is deleted. This link has ended, or part of
its address is missing.</p>
<p>What to do: if the address was copied, copy all of it. Otherwise have the image made again where it was made the
first time, and save it from there.</p>
</html>
"""


def wants_page(accept: str) -> bool:
    """Whether a browser asks for a page: it names HTML, which an `<img>` and the usual programs do not."""
    kinds = [part.partition(";") for part in accept.lower().split(",")]
    return any(kind.strip() == "text/html" and rest.replace(" ", "") != "q=0" for kind, _, rest in kinds)


def gone_page(retention_hours: float) -> HTMLResponse:
    """Make the page. Nothing of the request is in it."""
    headers = {
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Vary": "Accept",
    }
    return HTMLResponse(_PAGE.format(hours=retention_hours), 404, headers=headers)
