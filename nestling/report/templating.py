"""The Jinja2 environment that the pages are made with. It is imported when a page is made, and not
before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from nestling.report.svg import style_class, swatch
from nestling.report.words import percent, plural

FRAME = "page.html"
"""The template around every page, the only one whose line breaks are the page's."""


class JoinedLines(Extension):
    """Line breaks and indentation of a template are for its reader: the page has none of them."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """The template's text without them."""
        for token in stream:
            joined = token.type == "data" and stream.name != FRAME
            yield token._replace(value=re.sub(r"\n\s*", "", token.value)) if joined else token


@cache
def environment() -> Environment:
    """The one environment: it escapes every value that is no `Markup`, and refuses a name that it
    does not know."""
    made = Environment(
        loader=PackageLoader("nestling.report"),
        autoescape=True,
        undefined=StrictUndefined,
        extensions=[JoinedLines],
    )
    made.globals |= {
        "percent": percent,
        "plural": plural,
        "style_class": style_class,
        "swatch": swatch,
    }
    return made
