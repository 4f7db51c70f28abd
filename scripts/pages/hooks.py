"""For `scripts/docs`: the site has only docs/, so a link to a file elsewhere becomes the name of that file."""

import re

OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([\w./-]+)(?:#[\w-]*)?\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace such links: `[its rules](../engine/DESIGN.md)` -> its rules (`engine/DESIGN.md`)."""
    return OUTSIDE.sub(lambda link: link[1] if link[1].strip("`") == link[2] else f"{link[1]} (`{link[2]}`)", markdown)
