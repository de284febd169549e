"""MkDocs hook: a page loads nothing from another host, also when it is opened as a file."""

import re
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.utils import get_relative_url

SHIM = "https://unpkg.com/iframe-worker/shim"  # of the theme; `assets/worker.js` replaces it
LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\ssrc=[\"']?(?:https?:)?//[^\"'\s>]+")
STYLES = re.compile(
    r"<link\b(?=[^>]*rel=[\"']?(?:stylesheet|icon|preconnect))[^>]*(?:https?:)?//[^>]+"
)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Replace the theme's script from elsewhere, and refuse any other."""
    output = output.replace(SHIM, get_relative_url("assets/worker.js", page.url))
    if found := LOADED.findall(output) + STYLES.findall(output):
        raise PluginError(f"{page.file.src_uri} would load {', '.join(found)}.")
    return output


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Do the same for the page that is shown instead of a missing one."""
    return output_content.replace(SHIM, "/assets/worker.js")
