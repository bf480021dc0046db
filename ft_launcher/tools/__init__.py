"""Beside the product: subcommands, reports, pages, watched output. The core imports none of it."""
