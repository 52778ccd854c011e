"""The console that commands print with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from onnxfuse.visible import visible_lines


class GuardedConsole(Console):
    """A console on which text, whoever made it, shows and does not steer."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Text with marks; its controls are written out before it is laid out, so that columns stay in line."""
        return super().render_str(visible_lines(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What is written; of the terminal's controls only rich's own, for a line of progress, pass."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible_lines(segment.text), _without_link(segment.style))


def _without_link(style: Style | None) -> Style | None:
    """A style of which no link is made."""
    return style.update_link(None) if style is not None and style.link else style
