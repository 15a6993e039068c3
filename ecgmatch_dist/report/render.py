"""Tables as Markdown, CSV and LaTeX. The HTML is the page's template."""

import csv
import io
from collections.abc import Iterable

from ecgmatch_dist.report.tables import Block, Cell, Table


def markdown(table: Table) -> str:
    parts = [f"## {table.title}"]
    for block in table.blocks:
        if len(table.blocks) > 1:
            parts.append(f"### {block.title}")
        lines = [block.header, ["---"] + ["---:"] * (len(block.header) - 1)]
        lines += [[f"**{pipe(c.text)}**" if c.strong else pipe(c.text) for c in row] for row in block.rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join([*parts, table.note] if table.note else parts) + "\n"


def pipe(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def comma(table: Table) -> str:
    """One line a number: tidy, for any program."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "block", "row", "column", "kind", "mean", "std", "runs", "text"])
    for block in table.blocks:
        for row in block.rows:
            column = ""
            for cell, header in zip(row[1:], block.header[1:], strict=True):
                column = column if cell.kind in ("paper", "difference") else header
                numbers = ["" if x is None else f"{x:.6g}" for x in (cell.value, cell.std)]
                runs = " ".join(run.name for run in cell.runs)
                writer.writerow([table.key, block.title, row[0].text, column, cell.kind, *numbers, runs, cell.text])
    return out.getvalue()


TEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "|": "\\textbar{}",
    "±": "$\\pm$",
    "−": "$-$",
    "–": "--",
    "×": "$\\times$",
    "↑": "$\\uparrow$",
    "↓": "$\\downarrow$",
    "Δ": "$\\Delta$",
    "λ": "$\\lambda$",
    "β": "$\\beta$",
    "≥": "$\\geq$",
    "≤": "$\\leq$",
    "\u00a0": "~",
}


def tex(text: str) -> str:
    """Text that pdflatex sets as it stands; signs that its fonts lack become question marks."""
    return "".join(TEX.get(c, c if c.isprintable() and ord(c) < 0x180 else "?") for c in text)


def latex(table: Table) -> str:
    """A table environment (packages booktabs and graphicx), as wide as the text."""
    width = max(len(block.header) for block in table.blocks)
    lines = ["\\begin{table}[htbp]", "\\centering", f"\\caption{{{tex(table.title)}. {tex(table.note)}}}"]
    lines += [
        f"\\label{{tab:{tex_label(table.key)}}}",
        "\\resizebox{\\linewidth}{!}{%",
        f"\\begin{{tabular}}{{l*{{{width - 1}}}{{r}}}}",
    ]
    lines.append("\\toprule")
    for i, block in enumerate(table.blocks):
        if i:
            lines.append("\\midrule")
        if len(table.blocks) > 1:
            lines += [f"\\multicolumn{{{width}}}{{c}}{{\\textbf{{{tex(block.title)}}}}} \\\\", "\\midrule"]
        lines += [tex_row(map(tex, block.header)), "\\midrule"]
        lines += [tex_row(map(tex_cell, row)) for row in block.rows]
    lines += ["\\bottomrule", "\\end{tabular}}", "\\end{table}"]
    return "\n".join(lines) + "\n"


def tex_cell(cell: Cell) -> str:
    return f"\\textbf{{{tex(cell.text)}}}" if cell.strong else tex(cell.text)


def tex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + " \\\\"


def tex_label(key: str) -> str:
    return "".join(c if (c.isalnum() and c.isascii()) or c in "-." else "-" for c in key)


def latex_document(names: Iterable[str]) -> str:
    """A document that shows all tables, to look at or to copy from."""
    inputs = "\n".join(f"\\input{{{name}}}\n\\clearpage" for name in names)
    return f"""\\documentclass[a4paper]{{article}}
\\usepackage[T1]{{fontenc}}
\\usepackage[utf8]{{inputenc}}
\\usepackage[margin=20mm]{{geometry}}
\\usepackage{{booktabs,graphicx}}
\\begin{{document}}
{inputs}
\\end{{document}}
"""


def plain(key: str, title: str, note: str, blocks: Iterable[tuple[str, list[str], list[list[str | Cell]]]]) -> Table:
    """A table of texts: blocks of (title, header, rows)."""

    def line(row: list[str | Cell]) -> tuple[Cell, ...]:
        cells = [c if isinstance(c, Cell) else Cell(c, "text" if i else "label") for i, c in enumerate(row)]
        return tuple(cells)

    return Table(key, title, note, tuple(Block(t, tuple(header), tuple(map(line, rows))) for t, header, rows in blocks))
