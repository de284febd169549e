"""Griffe extension: read the section `Example:` of a docstring as its parser reads `Examples:`."""

import re
from typing import Any

import griffe


class Example(griffe.Extension):
    """Rename the section before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section of one object."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
