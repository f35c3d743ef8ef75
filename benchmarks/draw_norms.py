"""Draw docs/pictures/norm_axes.svg and docs/pictures/norm_invariances.svg: `python benchmarks/draw_norms.py`.

The second picture shows the values of `cnorm.analysis.invariance_table()`, computed when it is drawn.
"""

from pathlib import Path

from cnorm.analysis import NORMS, TRANSFORMATIONS, invariance_table

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
SIZE, CELL, SLANT = 6, 18, 9  # cells along each edge of a cube, width of a cell, offset of a cell along the depth axis
PLAIN, MEANT, LINE, TEXT, GREEN, GREY = "#f4f4f4", "#3b78b5", "#999999", "#222222", "#d5ead9", "#f1f1f1"


def svg(width, height, shapes):
    style = f'font-family="sans-serif" font-size="14" fill="{TEXT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [f"{head} {style}>", f'<rect width="{width}" height="{height}" fill="white"/>', *shapes, "</svg>\n"]
    )


def text(x, y, words, anchor="middle", extra=""):
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {extra}>{words}</text>'


def polygon(points, meant):
    corners = " ".join(f"{x},{y}" for x, y in points)
    return f'<polygon points="{corners}" fill="{MEANT if meant else PLAIN}" stroke="{LINE}"/>'


def cube(left, top, meant):
    """Front, top and right faces of a cube of samples (into the page), channels (across) and space (down).

    meant(sample, channel, space) says whether a cell is among those that one mean is taken over.
    """
    top += SIZE * SLANT
    last = SIZE - 1
    shapes = []
    for a in range(SIZE):
        for b in range(SIZE):
            x, y = left + a * CELL, top + b * CELL
            square = [(x, y), (x + CELL, y), (x + CELL, y + CELL), (x, y + CELL)]
            shapes.append(polygon(square, meant(0, a, b)))
            x, y = left + a * CELL + b * SLANT, top - b * SLANT
            shapes.append(
                polygon([(x, y), (x + CELL, y), (x + CELL + SLANT, y - SLANT), (x + SLANT, y - SLANT)], meant(b, a, 0))
            )
            x, y = left + SIZE * CELL + a * SLANT, top + b * CELL - a * SLANT
            shapes.append(
                polygon(
                    [(x, y), (x + SLANT, y - SLANT), (x + SLANT, y - SLANT + CELL), (x, y + CELL)], meant(a, last, b)
                )
            )
    return shapes


def axes_picture():
    cubes = {
        "batch norm": lambda sample, channel, space: channel == 2,
        "layer norm": lambda sample, channel, space: sample == 0,
        "group norm": lambda sample, channel, space: sample == 0 and channel in (2, 3),
        "instance norm": lambda sample, channel, space: sample == 0 and channel == 2,
        "divisive norm": lambda sample, channel, space: sample == 0 and space == 2 and 1 <= channel <= 3,
    }
    pitch = SIZE * (CELL + SLANT) + 30
    shapes = []
    for i, (name, meant) in enumerate(cubes.items()):
        left = 40 + i * pitch
        shapes += cube(left, 40, meant)
        shapes.append(text(left + SIZE * (CELL + SLANT) / 2, 24, name, extra='font-weight="bold"'))
    bottom = 40 + SIZE * (SLANT + CELL)
    across, down = 40 + SIZE * CELL, 40 + SIZE * SLANT + SIZE * CELL / 2
    shapes += [
        text(40 + SIZE * CELL / 2, bottom + 18, "channels"),
        text(28, down, "space", extra=f'transform="rotate(-90 28 {down})"'),
        text(across + 22, bottom - 2, "batch", "start", f'transform="rotate(-45 {across + 22} {bottom - 2})"'),
    ]
    return svg(40 + 5 * pitch, bottom + 34, shapes)


def invariances_picture():
    table = invariance_table()
    left, top, width, height = 250, 44, 150, 34
    shapes = []
    for i, norm in enumerate(NORMS):
        shapes.append(text(left + (i + 0.5) * width, top - 14, f"{norm} norm", extra='font-weight="bold"'))
    for j, transformation in enumerate(TRANSFORMATIONS):
        y = top + j * height
        shapes.append(text(left - 14, y + 22, transformation, "end"))
        for i in range(len(NORMS)):
            yes, effect = table.invariant[i, j], table.effects[i, j]
            x = left + i * width
            fill = GREEN if yes else GREY
            shapes.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="white"/>')
            words = "invariant" if yes else f"moves by {effect:.1f}"
            shapes.append(text(x + width / 2, y + 22, words))
    return svg(left + 3 * width + 20, top + len(TRANSFORMATIONS) * height + 16, shapes)


if __name__ == "__main__":
    (PICTURES / "norm_axes.svg").write_text(axes_picture())
    (PICTURES / "norm_invariances.svg").write_text(invariances_picture())
