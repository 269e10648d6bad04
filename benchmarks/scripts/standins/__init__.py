"""Data and packages that stand in for downloads, so that public scripts run on a machine without a network."""
