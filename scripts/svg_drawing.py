"""Shapes and texts of an SVG, `WIDTH` units wide on a white card. `site_pictures.py` draws with them."""

from collections.abc import Sequence
from html import escape

from flash_train.records.plots import BLUE, GREEN, ORANGE, VERMILION

WIDTH = 700
INK, GREY, PALE, SKY, PURPLE = "#1A1A1A", "#595959", "#ECECEC", "#56B4E9", "#CC79A7"
PALETTE = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE)  # Okabe & Ito (2008)
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


class Drawing:
    """The shapes of one picture, in order."""

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title = height, title
        self.shapes: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, edge: str = "", line: float = 1) -> None:
        stroke = f' stroke="{edge}" stroke-width="{_short(line)}"' if edge else ""
        place = f'x="{_short(x)}" y="{_short(y)}" width="{_short(width)}" height="{_short(height)}"'
        self.shapes.append(f'<rect {place} fill="{fill}"{stroke}/>')

    def text(
        self, x: float, y: float, words: str, size: int = 20, anchor: str = "start", fill: str = INK,
        bold: bool = False, upwards: bool = False,
    ) -> None:  # fmt: skip
        style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}"' + ' font-weight="bold"' * bold
        style += f' transform="rotate(-90 {_short(x)} {_short(y)})"' * upwards
        self.shapes.append(f'<text x="{_short(x)}" y="{_short(y)}" {style}>{escape(words)}</text>')

    def line(self, points: Sequence[tuple[float, float]], color: str = INK, width: float = 2, dash: str = "") -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        style = f'fill="none" stroke="{color}" stroke-width="{_short(width)}"{dashes}'
        self.shapes.append(f'<polyline points="{_places(points)}" {style}/>')

    def area(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        self.shapes.append(f'<polygon points="{_places(points)}" fill="{fill}"/>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, words: str = "", size: int = 18) -> None:
        """Draw a rectangle with a white edge, and its words in the middle if they fit."""
        self.rect(x, y, width, height, fill, "#FFFFFF", 2)
        if words and 0.56 * size * len(words) + 6 <= width:
            self.text(x + width / 2, y + height / 2 + 0.36 * size, words, size, "middle", _readable_on(fill), True)

    def svg(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img"'
        card = f'<rect width="{WIDTH}" height="{self.height}" rx="14" fill="#FFFFFF"/>'
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([f'{head} font-family="{FONT}">', title, card, *self.shapes, "</svg>\n"])


def _readable_on(fill: str) -> str:
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else "#FFFFFF"


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _places(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_short(x)},{_short(y)}" for x, y in points)
