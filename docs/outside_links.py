"""For the site: links out of docs/, which lead to files of the repository, where there is none.

On the repository's web view `../examples/own_method.py` works as it stands. On the site it leads to the repository if `repo_url` is
set, and is plain text otherwise.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """A page with its links out of docs/ made to lead somewhere."""
    folder = posixpath.dirname(page.file.src_uri)

    def led(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if not target.startswith("../"):
            return link[0]
        home = (config.repo_url or "").rstrip("/")
        return f"[{link[1]}]({home}/blob/main/{target[3:]})" if home else link[1]

    return LINK.sub(led, markdown)
