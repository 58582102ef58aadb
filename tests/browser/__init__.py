"""Tests in a real browser, on JupyterLab's own page."""
