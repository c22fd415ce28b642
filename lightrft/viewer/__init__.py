"""Reports and pages about run folders."""
