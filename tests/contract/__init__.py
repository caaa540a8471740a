"""One suite a seam, passed by every implementation."""
