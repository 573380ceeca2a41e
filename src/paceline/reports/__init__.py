"""Reports: runs and measurements as a page, figures, tables and a live view."""
