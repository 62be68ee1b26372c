"""Docstrings as Markdown, for the page of the Python API: an extension of griffe, which reads them for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Readable(griffe.Extension):
    """Our docstrings are plain text in which ``::`` begins a block of code, as in reStructuredText."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Change the docstring of a module, class, function or attribute that was read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"::(?=\n\n)", ":", obj.docstring.value)

    def on_package(self, *, pkg: Any, **kwargs: Any) -> None:
        """The same for the package itself."""
        self.on_object(obj=pkg)
