"""Tables that never cut a number: where the terminal is narrow, texts wrap, then columns go, then rows become records.

    wide         all columns, a line a row
    narrower     columns of text wrap, long words too; figures with words between them wrap at the words
    narrow       columns that may go are left out, one after another
    too narrow   every row as lines of "head  cell"
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

LEAST, WORD = 12, 24
"""Characters to which a column of text is narrowed; to its longest word, up to the second, where that is more."""

GAP = 2
"""Spaces between columns."""


class FittedTable(Table):
    """A table without lines that makes itself fit the width it is given."""

    def __init__(self, heads: Sequence[str], left: Sequence[int], wrap: Sequence[int], drop: Sequence[int]) -> None:
        super().__init__(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
        for place, head in enumerate(heads):
            self.add_column(head, justify="left" if place in left else "right", no_wrap=True)
        self._texts, self._wrapping, self._going = frozenset(left), frozenset(wrap), tuple(drop)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What is written: the table, or its rows as records."""
        cells = [[_text(console, cell) for cell in column.cells] for column in self.columns]
        widths = self._widths([[Text(str(column.header)), *texts]
                               for column, texts in zip(self.columns, cells, strict=True)], options.max_width)
        if widths is None:
            yield from self._records(cells)
        else:
            yield from Table.__rich_console__(self._narrowed(widths), console, options)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As much as there is: how it is used is the table's own business."""
        return Measurement(1, options.max_width)

    def _widths(self, cells: Sequence[Sequence[Text]], room: int) -> dict[int, int] | None:
        """Widths of the columns that are shown, by place; None where the rest would not fit."""
        kept = {place: max(cell_len(line) for text in column for line in text.plain.split("\n"))
                for place, column in enumerate(cells)}
        least = {place: min(width, self._least(place, cells[place])) for place, width in kept.items()}
        going = list(self._going)
        while sum(least[place] for place in kept) + GAP * (len(kept) - 1) > room:
            if not going:
                return None
            del kept[going.pop(0)]
        while sum(kept.values()) + GAP * (len(kept) - 1) > room:
            widest = max(kept, key=lambda place: kept[place] - least[place])
            kept[widest] -= 1
        return kept

    def _least(self, place: int, cells: Sequence[Text]) -> int:
        """How narrow a column may become: one of text almost any width, one of figures that wraps that of a word."""
        word = max(cell_len(word) for text in cells for word in text.plain.split() or [""])
        if place in self._texts:
            return max(LEAST, min(word, WORD))
        return word if place in self._wrapping else max(cell_len(text.plain) for text in cells)

    def _narrowed(self, widths: dict[int, int]) -> Table:
        """The table with these columns."""
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
        shown: list[Column] = [self.columns[place] for place in widths]
        for column, width in zip(shown, widths.values(), strict=True):
            table.add_column(column.header, justify=column.justify, width=width, overflow="fold")
        for row in zip(*(column.cells for column in shown), strict=True):
            table.add_row(*row)
        return table

    def _records(self, cells: Sequence[Sequence[Text]]) -> RenderResult:
        """Every row as lines of its heads and cells; a blank line between rows."""
        heads = [str(column.header) for column in self.columns]
        for place, row in enumerate(zip(*cells, strict=True)):
            if place:
                yield Text("")
            for head, cell in zip(heads, row, strict=True):
                if cell.plain:
                    yield Text.assemble((f"{head}  " if head else "", "dim"), cell)


def _text(console: Console, cell: object) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell))
