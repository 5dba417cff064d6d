"""The tables of the pages, by subject: each function reads committed results and returns Markdown."""
