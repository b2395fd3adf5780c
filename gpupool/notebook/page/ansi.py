"""Text with terminal colours, as HTML and as plain text. Pure; runs on the client."""

from __future__ import annotations

from html import escape

from gpupool.core.terminal import CODES
from gpupool.notebook.page import markup

_MAX_NUMBERS = 32  # in one code
_LOOKS = {1: {"font-weight": "bold"}, 4: {"text-decoration": "underline"}}
_COLOURS = {
    0: "#57606a",  # black
    1: "#cf222e",  # red
    2: "#1a7f37",  # green
    3: "#9a6700",  # yellow
    4: "#0969da",  # blue
    5: "#8250df",  # magenta
    6: "#1b7c83",  # cyan
    7: "#8c959f",  # white
}


def plain(text: str) -> str:
    return CODES.sub("", text)


def without_moves(text: str) -> str:
    """The text with its colours only."""
    return CODES.sub(lambda match: match[0] if match[1] is not None else "", text)


def to_html(text: str) -> str:
    """The text as HTML, with its colours; other codes are left out."""
    shown: list[str] = []
    position, style = 0, ""
    for match in CODES.finditer(text):
        shown.append(_styled(text[position : match.start()], style))
        position = match.end()
        if match[1] is not None:
            style = _style(match[1], style)
    shown.append(_styled(text[position:], style))
    return "".join(shown)


def _styled(text: str, style: str) -> str:
    if not text:
        return ""
    return f'<span style="{style}">{escape(text)}</span>' if style else escape(text)


def _style(codes: str, style: str) -> str:
    # A code changes one property and leaves the others, so the style before it is taken apart.
    parts = dict(part.split(":", 1) for part in style.split(";") if part)
    # no colour needs more, and Python makes no number of thousands of digits
    numbers = [int(code[:9] or 0) for code in codes.split(";", _MAX_NUMBERS)[:_MAX_NUMBERS]]
    while numbers:
        number = numbers.pop(0)
        tens = number // 10
        if number == 0:
            parts.clear()
        elif number in _LOOKS:
            parts |= _LOOKS[number]
        elif number in (39, 49):
            parts.pop("color" if number == 39 else "background", None)
        elif tens in (3, 4, 9, 10):
            # 38 and 48 are one of 256 colours, which IPython's themes use, or any
            is_other = number in (38, 48)
            colour = _of_many(numbers) if is_other else _COLOURS.get(number % 10)
            if colour and tens in (3, 9):
                parts["color"] = markup.ink(colour)
            elif colour:  # the page's own ink stays readable on it, on light and dark
                parts["background"] = f"color-mix(in srgb,{colour} 35%,transparent)"
    return ";".join(f"{key}:{value}" for key, value in parts.items())


def _of_many(numbers: list[int]) -> str:
    """Take the rest of `38;5;n` or `38;2;red;green;blue` from the codes; "" if it is no colour."""
    kind = numbers.pop(0) if numbers else 0
    # 5 is followed by a number of the 256, 2 by red, green and blue.
    values = [min(255, numbers.pop(0)) for _ in range(min(len(numbers), 1 if kind == 5 else 3))]
    if kind == 2 and len(values) == 3:
        return "#{:02x}{:02x}{:02x}".format(*values)
    if kind != 5 or not values:
        return ""
    number = values[0]
    if number < 16:
        return _COLOURS[number % 8]
    # 24 greys, from nearly black to nearly white; below them is a cube of 6 x 6 x 6 colours.
    if number >= 232:
        return "#" + f"{8 + 10 * (number - 232):02x}" * 3
    cube = number - 16
    levels = [0 if n == 0 else 55 + 40 * n for n in (cube // 36, cube // 6 % 6, cube % 6)]
    return "#{:02x}{:02x}{:02x}".format(*levels)
