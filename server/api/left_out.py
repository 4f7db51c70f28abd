"""Tools of types that a model here cannot call: left out of a request, not refused, since agents offer them unasked.

The answer's header `x-hearth-ignored` and the access line name them by words of this file, never by what was sent.
"""

import re
from collections.abc import Callable
from typing import Any

from server.api.schema import Strict

_KNOWN = frozenset(
    {
        *("advisor", "apply_patch", "bash", "code_execution", "code_interpreter", "computer", "computer_use"),
        *("computer_use_preview", "custom", "file_search", "image_generation", "local_shell", "mcp", "mcp_toolset"),
        *("memory", "namespace", "shell", "text_editor", "tool_search", "tool_search_tool_bm25"),
        *("tool_search_tool_regex", "web_fetch", "web_search", "web_search_preview"),
    }
)
_VERSION = re.compile(r"(_\d{8}|_\d{4}_\d{2}_\d{2})$")


class OtherTool(Strict):
    """A tool that runs elsewhere, or is called by other means. It is left out."""

    type: str

    @property
    def word(self) -> str:
        """Our word for its type, without a version; `other` where we have none."""
        word = _VERSION.sub("", self.type[:64])
        return word if word in _KNOWN else "other"


def callable_or_other(callable_type: str) -> Callable[[Any], str]:
    """Make a discriminator with the tags `callable` (also of what has no type, or is no tool) and `other`."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return "other" if isinstance(kind, str) and kind != callable_type else "callable"

    return tag
