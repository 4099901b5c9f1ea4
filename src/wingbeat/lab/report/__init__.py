"""One run as a page, a picture, and two summaries."""

from wingbeat.lab.report.write import write_report

__all__ = ["write_report"]
