"""Finished tables as Markdown, CSV and LaTeX. The HTML is in page.html.jinja."""

import csv
import io
from collections.abc import Iterable

from ecgmatch_dist.files.plain import plain_cell
from ecgmatch_dist.report.tables import Cell, Table


def to_markdown(table: Table) -> str:
    parts = [f"## {table.title}"]
    for block in table.blocks:
        if len(table.blocks) > 1:
            parts.append(f"### {block.title}")
        lines = [block.header, ["---"] + ["---:"] * (len(block.header) - 1)]
        lines += [[markdown_cell(cell) for cell in row] for row in block.rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join([*parts, table.note] if table.note else parts) + "\n"


def markdown_cell(cell: Cell) -> str:
    text = cell.text.replace("|", "\\|").replace("\n", " ")
    return f"**{text}**" if cell.bold else text


def to_csv(table: Table) -> str:
    """One line per number, not one per row: easy to load and filter."""
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
                texts = [table.key, block.title, row[0].text, column, cell.kind, *numbers, runs, cell.text]
                writer.writerow([plain_cell(text) for text in texts])
    return out.getvalue()


LATEX = {
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


def escape_latex(text: str) -> str:
    """Text for pdflatex; characters that its fonts lack become question marks."""
    return "".join(LATEX.get(c, c if c.isprintable() and ord(c) < 0x180 else "?") for c in text)


def to_latex(table: Table) -> str:
    """A table environment, as wide as the text; it needs the packages booktabs and graphicx."""
    width = max(len(block.header) for block in table.blocks)
    lines = [
        "\\begin{table}[htbp]",
        "\\centering",
        f"\\caption{{{escape_latex(table.title)}. {escape_latex(table.note)}}}",
        f"\\label{{tab:{latex_label(table.key)}}}",
        "\\resizebox{\\linewidth}{!}{%",
        f"\\begin{{tabular}}{{l*{{{width - 1}}}{{r}}}}",
        "\\toprule",
    ]
    for i, block in enumerate(table.blocks):
        if i:
            lines.append("\\midrule")
        if len(table.blocks) > 1:
            lines += [f"\\multicolumn{{{width}}}{{c}}{{\\textbf{{{escape_latex(block.title)}}}}} \\\\", "\\midrule"]
        lines += [latex_row(map(escape_latex, block.header)), "\\midrule"]
        lines += [latex_row(map(latex_cell, row)) for row in block.rows]
    lines += ["\\bottomrule", "\\end{tabular}}", "\\end{table}"]
    return "\n".join(lines) + "\n"


def latex_cell(cell: Cell) -> str:
    return f"\\textbf{{{escape_latex(cell.text)}}}" if cell.bold else escape_latex(cell.text)


def latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + " \\\\"


def latex_label(key: str) -> str:
    return "".join(c if (c.isalnum() and c.isascii()) or c in "-." else "-" for c in key)


def latex_document(names: Iterable[str]) -> str:
    """A document with all tables, to view or to copy from."""
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
