"""A report as one HTML file with everything in it, for wide and narrow windows, light and dark. No network.

The page itself is `page.html`, a Jinja template. Whatever is put into it is escaped, and shown as `printable` has it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from sidestream.report.charts import DASHES, DAY, NIGHT, Chart
from sidestream.report.table import LONGEST, Table
from sidestream.tracking.untrusted import printable


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture in full size. Anybody may have made it: it is shown as an image and never becomes part of the page.

    Attributes:
        name, told: Above it.
        alt: What it shows, in words.
        content: Bytes of the file.
        kind: `image/png` or `image/svg+xml`.
        color: Of the page's colours.
    """

    name: str
    told: str
    alt: str
    content: bytes
    kind: str
    color: str

    @property
    def address(self) -> str:
        return f"data:{self.kind};base64,{base64.b64encode(self.content).decode()}"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A card of the page: what is there is shown, in this order.

    Attributes:
        lead: What is seen, in a sentence or two.
        numbers: The chart's figures, folded away.
        warnings, notes: Below it, a sentence each.
        half: Beside its neighbour in a wide window.
    """

    heading: str = ""
    lead: str = ""
    table: Table | None = None
    chart: Chart | None = None
    numbers: Table | None = None
    pictures: Sequence[Picture] = ()
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    half: bool = False


def page(*, title: str, also: str, facts: Mapping[str, str], sections: Sequence[Section]) -> str:
    """The whole page.

    Args:
        title, also: The heading, and its part that stands out.
        facts: Below it: name -> text.
        sections: The first table among them can be sorted, and `#sort=KEY,desc` opens the page sorted.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def shown(value: Any) -> Any:
        return value if isinstance(value, Markup) else printable(value, limit=LONGEST)

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["glued"] = glued
    return environment.get_template("page.html").render(
        title=title, also=also, facts=facts, sections=sections, day=DAY, night=NIGHT, dashes=DASHES
    )


def glued(detail: str) -> str:
    """In a narrow column a line ends behind a comma, or before a bracket or `to`: numbers stay with their units."""
    return re.sub(r"(?<!,) (?!to |\()", "\u00a0", detail)
