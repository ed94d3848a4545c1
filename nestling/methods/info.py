"""What a method is, in words: for lists, pages and the choice of a fair comparison."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Info:
    """What a method is: on its class by default, as `nestling methods` shows it; with its settings as `Method.as_set` says.
    Title and paper are those that its docstring begins with: `FedProto (Tan et al., "FedProto: …", AAAI 2022).`"""

    family: str  # baseline | width | depth | sparse | low-rank | public data | data-free | representation | fusion
    heterogeneity: str
    evidence: str  # official code read | from paper | from memory | ours
    group: str = ""  # with which others it makes a fair column (see `nestling.fair`); empty: with all of them
    auxiliary: str = "none"  # data beyond the clients' own: none | server proxy (unlabelled) | …
    global_model: bool = True
    own_networks: bool = False  # whether tiers may bring a network of their own
    personal: bool = False  # whether two clients of one tier end up with different models
    any_task: bool = False  # whether it needs no classes: it then serves every task
    model: str = ""  # the network it takes where the user names none (empty: the data's default)
    title: str = ""
    paper: str = ""

    @staticmethod
    def of_own_networks(family: str, heterogeneity: str, evidence: str, group: str, auxiliary: str = "none") -> Info:
        """The info of a method whose clients each have a network of their own and share no model."""
        return Info(family, heterogeneity, evidence, group, auxiliary, False, True, True)


_BEGINNING = re.compile(r"(?P<title>[^:(,.]+?)(?:[:,][^(]*?)? \((?P<authors>[^\"]+?), \"[^\"]+\"(?:, (?P<where>[^);]+))?")
"""How docstrings begin: FedProto (Tan et al., "FedProto: …", AAAI 2022)."""


def with_title(info: Info, docstring: str) -> Info:
    """With title and paper of a docstring, where it tells them and `info` does not."""
    found = _BEGINNING.match(" ".join(docstring.split()))
    if found is None:
        return info
    *others, last = found["authors"].split(", ")
    authors = last if not others else f"{others[0]} & {last}" if len(others) == 1 else f"{others[0]} et al."
    paper = ", ".join(part for part in (authors, found["where"]) if part)
    return replace(info, title=info.title or found["title"], paper=info.paper or paper)
