"""The parts of model.html (export/html_page.py puts them together)."""
